# Prints the string literals with several words of Rust files, without comments, attributes and test code: see scripts/messages.
#
# A tokenizer rather than patterns, since messages span lines, and comments and tests have quotes and braces, too.

function emit(text,   kind, level) {
  # In attributes, `reason`, `note` and the like are not shown at run time.
  if (skipping || in_attribute || text !~ /[^ ] [^ ]/ || text !~ /[a-z][a-z]/) return
  kind = "text"
  for (level = depth; level > 0; level--) {
    if (call[level] ~ /^(error|warn|info|debug|trace)!$/) { kind = substr(call[level], 1, length(call[level]) - 1); break }
    # Text of others, which an error is recognized by.
    if (call[level] ~ /^(contains|contains_ignore_ascii_case|starts_with|ends_with|strip_prefix|find)$/) return
    if (call[level] ~ /^(panic!|assert!|assert_eq!|assert_ne!|unreachable!|expect|unwrap_or_else)$/) {
      if (call[level] != "unwrap_or_else") kind = "panic"
      break
    }
  }
  if (FILENAME != shown) { printf "%s%s\n", shown == "" ? "" : "\n", FILENAME; shown = FILENAME }
  printf "  %-5s  %s\n", kind, text
}

# The identifier, with `!` for a macro, that ends a piece of code.
function last_word(code) {
  sub(/[ \t]+$/, "", code)
  return match(code, /[A-Za-z_][A-Za-z0-9_]*!?$/) ? substr(code, RSTART) : ""
}

function reset() {
  state = "code"; depth = 0; braces = 0; skipping = 0; test_item = 0; in_attribute = 0; before = ""; literal = ""; delete call
}

FNR == 1 { reset() }

{
  line = $0
  if (continued) { sub(/^[ \t]+/, "", line); continued = 0 }
  # A macro's parameter is part of the message.
  while (match(line, /\$[a-z_]+, "/)) line = substr(line, 1, RSTART - 1) "\"<" substr(line, RSTART + 1, RLENGTH - 4) ">" substr(line, RSTART + RLENGTH)
  if (state == "code" && !skipping && line ~ /^[ \t]*#\[cfg\((all\()?test[,)]/) test_item = 1
  if (state == "code" && line ~ /^[ \t]*#!?\[/) in_attribute = 1
  while (line != "") {
    if (state == "string") {
      if (match(line, /["\\]/) == 0) { literal = literal line " "; line = ""; continue }
      literal = literal substr(line, 1, RSTART - 1)
      if (substr(line, RSTART, 1) == "\"") {
        state = "code"; line = substr(line, RSTART + 1); emit(literal); before = ""
      } else if (RSTART == length(line)) {
        # The literal continues with the first word of the next line.
        line = ""; continued = 1
      } else {
        escaped = substr(line, RSTART + 1, 1)
        literal = literal (escaped == "\"" || escaped == "\\" ? escaped : "\\" escaped)
        line = substr(line, RSTART + 2)
      }
    } else if (state == "raw") {
      end = index(line, "\"" hashes)
      if (end == 0) { literal = literal line " "; line = ""; continue }
      state = "code"; literal = literal substr(line, 1, end - 1); line = substr(line, end + 1 + length(hashes))
      emit(literal); before = ""
    } else if (state == "comment") {
      end = index(line, "*/")
      if (end == 0) { line = ""; continue }
      state = "code"; line = substr(line, end + 2)
    } else {
      if (match(line, /["'(){};\]]|\/\/|\/\*/) == 0) { before = before line; line = ""; continue }
      before = before substr(line, 1, RSTART - 1)
      token = substr(line, RSTART, 1)
      rest = substr(line, RSTART + 1)
      if (token == "/") {
        if (substr(rest, 1, 1) == "/") { line = ""; continue }
        state = "comment"; line = substr(rest, 2)
      } else if (token == "\"") {
        literal = ""; line = rest
        if (match(before, /(^|[^A-Za-z0-9_])b?r#*$/)) {
          state = "raw"; hashes = before; sub(/.*r/, "", hashes)
        } else state = "string"
      } else if (token == "'") {
        # A character, or a lifetime.
        if (match(rest, /^(\\[^']+|\\'|[^'\\]+)'/) && (substr(rest, 1, 1) == "\\" || RLENGTH <= 5)) rest = substr(rest, RLENGTH + 1)
        before = ""; line = rest
      } else {
        if (token == "(") call[++depth] = last_word(before)
        else if (token == ")" && depth > 0) depth--
        else if (token == "{") {
          braces++
          if (test_item && !skipping) skipping = braces
        } else if (token == "}") {
          if (skipping == braces) { skipping = 0; test_item = 0 }
          braces--
        } else if (token == ";" && !skipping) test_item = 0
        else if (token == "]") in_attribute = 0
        before = token == "]" || token == "(" ? "" : token
        line = rest
      }
    }
  }
  if (state == "code") before = before " "
}
