# Prints which files of src import which others, as pairs for tsort: awk -f scripts/imports.awk FILES
#
# An import is a path that begins with crate, self, super or a child module, in a `use` or in code. It leads to the file that defines the
# item, also through re-exports. The re-exports of a mod.rs are no imports of their own. Comments and unit tests are left out.

# The module of a file: src/lock/mod.rs is lock, src/lock/lease.rs is lock::lease.
function module_of(file) {
  sub(/^src\//, "", file)
  sub(/\.rs$/, "", file)
  sub(/(^|\/)(mod|lib)$/, "", file)
  gsub(/\//, "::", file)
  return file
}

function is_module(path) { return path in file_of }

function parent(path) { return sub(/::[^:]*$/, "", path) ? path : "" }

function join(path, rest) { return path == "" || rest == "" ? path rest : path "::" rest }

# A path from the root of the crate. "?" for a path into another crate.
function absolute(module, path,   head) {
  if (path ~ /^crate(::|$)/) { module = ""; sub(/^crate(::)?/, "", path) }
  else if (path ~ /^self(::|$)/) sub(/^self(::)?/, "", path)
  else if (path ~ /^super(::|$)/) while (sub(/^super(::|$)/, "", path)) module = parent(module)
  else {
    head = path
    sub(/::.*/, "", head)
    if (!is_module(join(module, head))) return "?"
  }
  sub(/(::|^)self$/, "", path)
  return join(module, path)
}

# The module that defines an item: the longest prefix that is a module, or where that module re-exports the item from.
function defining(path, depth,   module, rest, name, next_name) {
  module = path
  while (module != "" && !is_module(module)) module = parent(module)
  rest = substr(path, module == "" ? 1 : length(module) + 3)
  name = rest
  sub(/::.*/, "", name)
  if (name == "" || depth > 6 || !((module, name) in reexported)) return module
  return defining(join(reexported[module, name], substr(rest, length(name) + 3)), depth + 1)
}

# Splits `a::{b, c::{d as e, self}}` into paths, in `paths`. Returns their number.
function expand(tree,   count, depth, prefix, path, at, char) {
  count = depth = 0
  prefix[0] = path = ""
  gsub(/[ \n]+as +[A-Za-z0-9_]+/, "", tree)
  gsub(/[ \n]/, "", tree)
  for (at = 1; at <= length(tree) + 1; at++) {
    char = substr(tree, at, 1)
    if (char == "{") {
      prefix[depth + 1] = prefix[depth] path
      depth++
      path = ""
    } else if (char == "," || char == "}" || char == "") {
      if (path != "") paths[++count] = prefix[depth] path
      path = ""
      if (char == "}") depth--
    } else path = path char
  }
  return count
}

function add(module, path) {
  path = absolute(module, path)
  if (path != "?") imports[module] = imports[module] " " path
}

# Collects the imports and re-exports of a file.
function read(module, text,   count, statements, at, statement, i, name, is_reexport) {
  count = split(text, statements, ";")
  for (at = 1; at <= count; at++) {
    statement = statements[at]
    if (match(statement, /(^|\n) *(pub(\([a-z]+\))? +)?use +[^;]*$/)) {
      is_reexport = substr(statement, RSTART) ~ /^\n? *pub/
      name = substr(statement, RSTART)
      sub(/^\n? *(pub(\([a-z]+\))? +)?use +/, "", name)
      statement = substr(statement, 1, RSTART)
      for (i = expand(name); i > 0; i--) {
        name = paths[i]
        if (is_reexport && absolute(module, name) != "?") {
          sub(/.*::/, "", name)
          reexported[module, name] = absolute(module, paths[i])
        }
        if (!is_reexport || file_of[module] !~ /(mod|lib)\.rs$/) add(module, paths[i])
      }
    }
    while (match(statement, /[a-z_][a-z_0-9]*(::[A-Za-z_0-9]+)+/)) {
      if (substr(statement, RSTART - 1, 1) !~ /[:A-Za-z0-9_]/) add(module, substr(statement, RSTART, RLENGTH))
      statement = substr(statement, RSTART + RLENGTH)
    }
  }
}

FNR == 1 {
  module = module_of(FILENAME)
  file_of[module] = FILENAME
  skips = ""
}
# A unit test, or an item for tests. Ends with the brace of its module, or with the next line.
/^#\[cfg\(.*test/ { skips = "item"; next }
skips == "item" { skips = /^(pub(\([a-z]+\))? )?mod [a-z_]+ \{/ ? "module" : ""; next }
skips == "module" { if (/^}/) skips = ""; next }
{
  sub(/\/\/.*/, "")
  text[module] = text[module] "\n" $0
}

END {
  for (module in text) read(module, text[module])
  for (module in imports) {
    count = split(imports[module], list, " ")
    for (at = 1; at <= count; at++) {
      target = defining(list[at], 0)
      if (target == module || !is_module(target) || module "::" target ~ /(^|::)tests(::|$)/) continue
      if (!((module, target) in seen)) print file_of[module], file_of[target]
      seen[module, target] = 1
    }
  }
}
