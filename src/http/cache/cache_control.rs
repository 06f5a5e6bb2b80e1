//! The field `Cache-Control` (RFC 9111, section 5.2). A line that cannot be read counts as `no-store`. A time that is not a number counts
//! as zero.

use std::time::Duration;

use ::http::HeaderMap;
use ::http::header::CACHE_CONTROL;

/// The directives of a message that matter to this cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheControl {
    pub(super) no_store: bool,
    pub(super) no_cache: bool,
    pub(super) private: bool,
    pub(super) must_revalidate: bool,
    pub(super) max_age: Option<Duration>,
    pub(super) s_maxage: Option<Duration>,
    pub(super) stale_while_revalidate: Option<Duration>,
    pub(super) stale_if_error: Option<Duration>,
}

impl CacheControl {
    /// Reads all lines of the field. A line that cannot be read counts as `no-store`.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut found = Self::default();
        for line in headers.get_all(CACHE_CONTROL) {
            let is_readable = line.to_str().is_ok_and(|line| found.read(line));
            found.no_store |= !is_readable;
        }
        found
    }

    /// Reads a line. False if a quoted string in it has no end.
    fn read(&mut self, line: &str) -> bool {
        let mut quotes = Quotes::default();
        // A comma within a quoted string does not separate directives.
        for directive in line.split(|character| quotes.note(character) && character == ',') {
            let (name, value) = directive.split_once('=').unwrap_or((directive, ""));
            self.add(&name.trim().to_ascii_lowercase(), value.trim());
        }
        !quotes.is_open
    }

    fn add(&mut self, name: &str, value: &str) {
        match name {
            "no-store" => self.no_store = true,
            // `no-cache` and `private` apply to the whole response, also if they name fields.
            "no-cache" => self.no_cache = true,
            "private" => self.private = true,
            "must-revalidate" | "proxy-revalidate" => self.must_revalidate = true,
            "max-age" => shortest(&mut self.max_age, value),
            "s-maxage" => shortest(&mut self.s_maxage, value),
            "stale-while-revalidate" => shortest(&mut self.stale_while_revalidate, value),
            "stale-if-error" => shortest(&mut self.stale_if_error, value),
            _ => {}
        }
    }
}

/// If a directive is repeated, the shortest time counts. A value that is not a number counts as zero.
fn shortest(time: &mut Option<Duration>, value: &str) {
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    let seconds = seconds(value).unwrap_or_default();
    *time = Some(time.map_or(seconds, |before| before.min(seconds)));
}

/// A number of seconds (RFC 9111, section 1.2.2). A number above `u32::MAX` counts as `u32::MAX`.
pub(super) fn seconds(text: &str) -> Option<Duration> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Duration::from_secs(text.parse::<u32>().unwrap_or(u32::MAX).into()))
}

/// Whether a character is within a quoted string.
#[derive(Default)]
struct Quotes {
    is_open: bool,
    is_escaped: bool,
}

impl Quotes {
    /// Notes the next character. True if it is outside of quoted strings.
    fn note(&mut self, character: char) -> bool {
        if self.is_escaped {
            self.is_escaped = false;
        } else if character == '"' {
            self.is_open = !self.is_open;
        } else if character == '\\' && self.is_open {
            self.is_escaped = true;
        }
        !self.is_open
    }
}

#[cfg(test)]
mod tests {
    use ::http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn read(lines: &[&str]) -> CacheControl {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CACHE_CONTROL, HeaderValue::from_str(line).unwrap());
        }
        CacheControl::of(&headers)
    }

    const fn secs(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn directives_are_read_in_any_case_and_spacing() {
        let found =
            read(&["Public , MAX-AGE=60,s-maxage = 5", "stale-while-revalidate=\"7\",stale-if-error=8,,x=\"a\""]);
        let expected = CacheControl {
            max_age: secs(60),
            s_maxage: secs(5),
            stale_while_revalidate: secs(7),
            stale_if_error: secs(8),
            ..CacheControl::default()
        };
        assert_eq!(found, expected);
        assert!(read(&["private=\"x, y\""]).private && read(&["No-Cache=\"set-cookie\""]).no_cache);
        assert!(read(&["proxy-revalidate"]).must_revalidate && read(&["must-revalidate"]).must_revalidate);
    }

    #[test]
    fn quoted_comma_separates_nothing() {
        assert!(!read(&["x=\"a, no-store, b\", max-age=1"]).no_store);
        assert!(!read(&[r#"x="a\", no-store", max-age=1"#]).no_store);
        assert!(read(&[r#"x="a", no-store"#]).no_store);
    }

    #[test]
    fn unreadable_line_counts_as_no_store() {
        assert!(read(&["max-age=60, x=\"no end"]).no_store);
        let mut headers = HeaderMap::new();
        headers.insert(CACHE_CONTROL, HeaderValue::from_bytes(b"max-age=60\xff").unwrap());
        assert!(CacheControl::of(&headers).no_store);
    }

    #[test]
    fn doubtful_time_is_the_shortest() {
        for (line, expected) in [
            ("max-age=60, max-age=5", 5),
            ("max-age=", 0),
            ("max-age", 0),
            ("max-age=-1", 0),
            ("max-age=+1", 0),
            ("max-age=1.5", 0),
            ("max-age=99999999999999999999", u32::MAX.into()),
        ] {
            assert_eq!(read(&[line]).max_age, secs(expected), "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read(line in "[ -~\\t]{0,60}") {
            read(&[line.trim()]);
        }
    }
}
