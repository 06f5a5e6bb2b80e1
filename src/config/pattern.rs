//! Patterns of paths, before the router sees them.

/// The longest pattern of a path.
const MAX_PATH: usize = 1_024;

/// How many parameters of a pattern the router has names for: it panics at one more. The rest of a path, `{*name}`, takes none.
const MAX_PARAMETERS: usize = 25;

/// What the router would take for a pattern that matches nothing.
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
    match path.chars().find(|sign| "?#".contains(*sign) || sign.is_whitespace() || sign.is_control()) {
        Some(sign) => Err(format!("no path of a request has {sign:?} in it")),
        None => Ok(()),
    }
}

/// Refuses the patterns of other systems, regular expressions among them. They would be text here, which no request has, and the limit would be off without a word.
fn check_spelling(path: &str) -> Result<(), String> {
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    let mut spelled = String::with_capacity(path.len());
    for (index, segment) in segments.iter().enumerate() {
        let is_last = index + 1 == segments.len();
        // A pattern is of the whole path anyway.
        let segment = segment.strip_suffix('$').filter(|_| is_last).unwrap_or(segment);
        spelled.push('/');
        match Foreign::of(segment, is_last) {
            None => spelled.push_str(segment),
            Some(Foreign::Segment(name)) => spelled.extend(["{", &name, "}"]),
            Some(Foreign::Rest(name)) => spelled.extend(["{*", &name, "}"]),
            Some(Foreign::Unknown(sign)) => {
                let what = "write `{name}` for a segment, `{*name}` for the rest of a path, and a rule for each of several paths";
                return Err(format!("`{sign}` in `{segment}` would be text that no request has: {what}; {ESCAPES}"));
            }
        }
    }
    if spelled == path {
        return Ok(());
    }
    Err(format!("`{path}` would be text that no request has: write `{spelled}`; {ESCAPES}"))
}

const ESCAPES: &str = "for a sign itself write `%2A` (*), `%3A` (:), `%3C` (<), `%2B` (+), `%24` ($), `%5B` ([), `%5D` (]), `%5C` (\\), `%5E` (^) or \
     `%7C` (|)";

/// What RFC 3986 has in no path, and `*`. Clients that send one as it is are matched by its escape.
const SIGNS: [char; 6] = ['*', '[', ']', '\\', '^', '|'];

/// What a segment stands for in another system.
enum Foreign {
    /// One segment, by this name.
    Segment(String),
    /// The rest of the path.
    Rest(String),
    /// No telling, for this sign.
    Unknown(char),
}

impl Foreign {
    fn of(segment: &str, is_last: bool) -> Option<Self> {
        // Of axum 0.7, Express and Rails; of Envoy, Kong, Traefik and nginx; of Flask and Rocket; of actix, gorilla and Spring.
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
        let (parameter, behind) = parameter.split_once('}').unwrap_or((parameter, ""));
        if let Some(sign) = before.chars().chain(behind.chars()).find(|sign| SIGNS.contains(sign)) {
            return Some(Self::Unknown(sign));
        }
        let name = parameter.strip_prefix('*').unwrap_or(parameter);
        let end = name.find([':', '=', '*', '[', '(', '<', '|', '^', '\\', '+'])?;
        let is_rest = name.starts_with('*') || name[end..].contains(".*") || name[end..].contains("**");
        let name = if end == 0 { name } else { &name[..end] };
        Some(if is_rest { rest(name) } else { Self::Segment(named(name, "name")) })
    }
}

/// The letters, digits and `_` of a name, or `otherwise` if there are none.
fn named(name: &str, otherwise: &str) -> String {
    let name: String = name.chars().filter(|sign| sign.is_ascii_alphanumeric() || *sign == '_').collect();
    if name.is_empty() { otherwise.to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_patterns_are_refused_with_the_right_spelling() {
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
