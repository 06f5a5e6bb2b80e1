//! Checks path patterns before the router parses them.

/// The maximum length of a pattern, in bytes.
const MAX_PATH: usize = 1_024;

/// The maximum number of parameters in a pattern. The router gives each an internal name, and panics if it needs more than 25 names.
/// `{*name}` needs none.
const MAX_PARAMETERS: usize = 25;

/// Refuses patterns that match no request, are too long, or would make the router panic.
pub(super) fn check_path(path: &str) -> Result<(), String> {
    if !path.starts_with('/') {
        return Err("a path begins with `/`".into());
    }
    if path.len() > MAX_PATH {
        return Err(format!("a path has at most {MAX_PATH} bytes"));
    }
    let parameters =
        path.replace("{{", "").split('/').filter(|part| part.contains('{') && !part.contains("{*")).count();
    if parameters > MAX_PARAMETERS {
        return Err(format!("a path has at most {MAX_PARAMETERS} parameters"));
    }
    check_spelling(path)?;
    match path.chars().find(|char| "?#".contains(*char) || char.is_whitespace() || char.is_control()) {
        Some(char) => Err(format!("the path of a request never contains {char:?}")),
        None => Ok(()),
    }
}

/// Refuses patterns of other systems and regular expressions. Here they would be literal text that no request contains, so the limit would
/// silently not apply.
fn check_spelling(path: &str) -> Result<(), String> {
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    let mut suggestion = String::with_capacity(path.len());
    for (index, segment) in segments.iter().enumerate() {
        let is_last = index + 1 == segments.len();
        // A pattern always matches the whole path, so `$` is redundant.
        let segment = segment.strip_suffix('$').filter(|_| is_last).unwrap_or(segment);
        suggestion.push('/');
        match OtherSyntax::of(segment, is_last) {
            None => suggestion.push_str(segment),
            Some(OtherSyntax::Segment(name)) => suggestion.extend(["{", &name, "}"]),
            Some(OtherSyntax::Rest(name)) => suggestion.extend(["{*", &name, "}"]),
            Some(OtherSyntax::Unknown(char)) => {
                let help = "write `{name}` for a segment, `{*name}` for the rest of a path, and a rule for each of several paths";
                return Err(format!("no request path contains the `{char}` in `{segment}`: {help}; {ESCAPES}"));
            }
        }
    }
    if suggestion == path {
        return Ok(());
    }
    Err(format!("no request has the path `{path}`: write `{suggestion}`; {ESCAPES}"))
}

const ESCAPES: &str = "to match the character itself, write `%2A` (*), `%3A` (:), `%3C` (<), `%2B` (+), `%24` ($), `%5B` ([), `%5D` (]), `%5C` (\\), \
     `%5E` (^) or `%7C` (|)";

/// Characters that RFC 3986 allows in no path, and `*`. A pattern with the escape also matches a request with the unescaped character.
const NOT_IN_PATHS: [char; 6] = ['*', '[', ']', '\\', '^', '|'];

/// The meaning of a segment in another system.
enum OtherSyntax {
    /// One segment with this name.
    Segment(String),
    /// The rest of the path, with this name.
    Rest(String),
    /// Not known, because of this character.
    Unknown(char),
}

impl OtherSyntax {
    fn of(segment: &str, is_last: bool) -> Option<Self> {
        // In this order: axum 0.7, Express and Rails; Envoy, Kong, Traefik and nginx; Flask and Rocket; actix, gorilla and Spring.
        let rest = |name: &str| {
            if is_last { Self::Rest(named(name, "rest")) } else { Self::Segment(named(name, "name")) }
        };
        if let Some(name) = segment.strip_prefix(':') {
            return Some(if name.ends_with(['*', '+']) { rest(name) } else { Self::Segment(named(name, "name")) });
        }
        if segment.starts_with('*') || matches!(segment, ".*" | ".+" | "(.*)" | "(.+)") {
            return Some(rest(segment));
        }
        if let Some(name) = segment.strip_prefix('<').and_then(|name| name.strip_suffix('>')) {
            let is_rest = name.starts_with("path:") || name.ends_with("..");
            let name = name.rsplit_once(':').map_or(name, |(_, name)| name);
            return Some(if is_rest { rest(name) } else { Self::Segment(named(name, "name")) });
        }
        let text = segment.replace("{{", "").replace("}}", "");
        let (before, parameter) = text.split_once('{').unwrap_or((&text, ""));
        let (parameter, after) = parameter.split_once('}').unwrap_or((parameter, ""));
        if let Some(char) = before.chars().chain(after.chars()).find(|char| NOT_IN_PATHS.contains(char)) {
            return Some(Self::Unknown(char));
        }
        let name = parameter.strip_prefix('*').unwrap_or(parameter);
        let end = name.find([':', '=', '*', '[', '(', '<', '|', '^', '\\', '+'])?;
        let is_rest = name.starts_with('*') || name[end..].contains(".*") || name[end..].contains("**");
        let name = if end == 0 { name } else { &name[..end] };
        Some(if is_rest { rest(name) } else { Self::Segment(named(name, "name")) })
    }
}

/// The letters, digits and `_` of a name, or `default` if there are none.
fn named(name: &str, default: &str) -> String {
    let name: String = name.chars().filter(|char| char.is_ascii_alphanumeric() || *char == '_').collect();
    if name.is_empty() { default.to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_patterns_are_refused_with_a_suggestion() {
        let cases = [
            ("/api/*", "`/api/{*rest}`"),
            ("/*", "`/{*rest}`"),
            ("/api/**", "`/api/{*rest}`"),
            ("/api/*path", "`/api/{*path}`"),
            ("/api/.*", "`/api/{*rest}`"),
            ("/api/(.*)", "`/api/{*rest}`"),
            ("/api/.+", "`/api/{*rest}`"),
            ("/users/*/orders", "`/users/{name}/orders`"),
            ("/users/:id", "`/users/{id}`"),
            ("/users/:id/orders/*", "`/users/{id}/orders/{*rest}`"),
            ("/:", "`/{name}`"),
            ("/files/:path*", "`/files/{*path}`"),
            ("/users/<id>", "`/users/{id}`"),
            ("/users/<int:id>", "`/users/{id}`"),
            ("/files/<path:rest>", "`/files/{*rest}`"),
            ("/files/<rest..>", "`/files/{*rest}`"),
            ("/users/{id:[0-9]+}", "`/users/{id}`"),
            ("/files/{rest:.*}", "`/files/{*rest}`"),
            ("/files/{path=**}", "`/files/{*path}`"),
            ("/files/{**rest}", "`/files/{*rest}`"),
            ("/files/a*b", "write `{name}` for a segment"),
            ("/files/{id}*", "write `{name}` for a segment"),
            ("/{{*}}", "write `{name}` for a segment"),
            ("/api/users$", "`/api/users`"),
            ("/users/:id$", "`/users/{id}`"),
            ("/api/.*$", "`/api/{*rest}`"),
            ("/users/[0-9]+", "`[` in `[0-9]+`"),
            ("/users/[^/]+/orders", "write `{name}` for a segment"),
            ("/users/\\d+", "`\\` in `\\d+`"),
            ("/files/{id}]", "`]` in `{id}]`"),
            ("/a/^b", "`^` in `^b`"),
            ("/(users|groups)/{id}", "a rule for each of several paths"),
        ];
        for (path, spelling) in cases {
            let error = check_path(path).unwrap_err();
            assert!(error.contains(spelling) && error.contains("`%2A`"), "{path}: {error}");
        }
    }

    #[test]
    fn patterns_and_plain_text_are_accepted() {
        let paths =
            ["/", "/a", "/a/", "/{id}", "/{*rest}", "/a/{id}/b", "/a-{id}", "/orders:cancel", "/a.b", "/a+b", "//"];
        for path in paths.into_iter().chain([
            "/%2A",
            "/a/%2A%2A",
            "/%3Aid",
            "/{{id}}",
            "/{user-id}",
            "/~me/@x/$y",
            "/$/a",
            "/a(b)",
            "/%5Ba%5D%5C%5E%7C%24",
        ]) {
            assert_eq!(check_path(path), Ok(()), "{path}");
        }
    }
}
