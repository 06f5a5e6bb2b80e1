//! Problem documents (RFC 9457), with the types that draft-ietf-httpapi-ratelimit-headers-10 registers.

use std::fmt::Write as _;

use ::http::StatusCode;

pub(super) struct Problem<'a> {
    pub(super) kind: Kind,
    pub(super) status: StatusCode,
    /// For people to read.
    pub(super) detail: &'a str,
    /// The names of the violated limits, for programs.
    pub(super) violated: Vec<&'a str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    QuotaExceeded,
    TemporaryReducedCapacity,
    AbnormalUsageDetected,
    MissingIdempotencyKey,
    InvalidIdempotencyKey,
    IdempotencyKeyReused,
    InFlight,
    OutcomeUnknown,
    ResponseNotStored,
    IdempotencyScopeFull,
    LockBusy,
    LockQueueFull,
    LockLost,
    LockUnavailable,
    /// No information beyond the status.
    Blank,
}

/// Problem types of idempotency and locks. No such types are registered, so they have Tollgate's own names.
macro_rules! ours {
    ($name:literal) => {
        concat!("urn:tollgate:", $name)
    };
}

impl Kind {
    const fn is_registered(self) -> bool {
        matches!(self, Self::QuotaExceeded | Self::TemporaryReducedCapacity | Self::AbnormalUsageDetected)
    }

    const fn uri(self) -> &'static str {
        match self {
            Self::QuotaExceeded => "https://iana.org/assignments/http-problem-types#quota-exceeded",
            Self::TemporaryReducedCapacity => {
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
            }
            Self::AbnormalUsageDetected => "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
            Self::MissingIdempotencyKey => ours!("idempotency:key-missing"),
            Self::InvalidIdempotencyKey => ours!("idempotency:key-invalid"),
            Self::IdempotencyKeyReused => ours!("idempotency:key-reused"),
            Self::InFlight => ours!("idempotency:in-flight"),
            Self::OutcomeUnknown => ours!("idempotency:outcome-unknown"),
            Self::ResponseNotStored => ours!("idempotency:response-not-stored"),
            Self::IdempotencyScopeFull => ours!("idempotency:scope-full"),
            Self::LockBusy => ours!("lock:busy"),
            Self::LockQueueFull => ours!("lock:queue-full"),
            Self::LockLost => ours!("lock:lost"),
            Self::LockUnavailable => ours!("lock:unavailable"),
            Self::Blank => "about:blank",
        }
    }

    const fn title(self) -> Option<&'static str> {
        match self {
            Self::QuotaExceeded => Some("Request cannot be satisfied as assigned quota has been exceeded"),
            Self::TemporaryReducedCapacity => {
                Some("Request cannot be satisfied due to temporary server capacity constraints")
            }
            Self::AbnormalUsageDetected => Some("Request not satisfied due to detection of abnormal request pattern"),
            Self::MissingIdempotencyKey => Some("Idempotency key is missing"),
            Self::InvalidIdempotencyKey => Some("Idempotency key is not valid"),
            Self::IdempotencyKeyReused => Some("Idempotency key was used for another request"),
            Self::InFlight => Some("Request is being served"),
            Self::OutcomeUnknown => Some("Outcome of the request is unknown"),
            Self::ResponseNotStored => Some("Response to the request was not stored"),
            Self::IdempotencyScopeFull => Some("Caller has reached its limit"),
            Self::LockBusy => Some("Lock is in use"),
            Self::LockQueueFull => Some("Too many requests wait for the lock"),
            Self::LockLost => Some("Lock of the request was lost"),
            Self::LockUnavailable => Some("Locks are not available"),
            Self::Blank => None,
        }
    }
}

impl Problem<'_> {
    pub(super) fn to_json(&self) -> String {
        // The title of "about:blank" is the reason phrase of the status.
        let title = self.kind.title().or(self.status.canonical_reason()).unwrap_or_default();
        let mut json = String::with_capacity(320);
        json.push_str(r#"{"type":"#);
        push_string(&mut json, self.kind.uri());
        json.push_str(r#","title":"#);
        push_string(&mut json, title);
        json.push_str(r#","status":"#);
        json.push_str(self.status.as_str());
        json.push_str(r#","detail":"#);
        push_string(&mut json, self.detail);
        // The registered types have this member, so it is written even if it is empty.
        if self.kind.is_registered() {
            json.push_str(r#","violated-policies":["#);
            for (i, name) in self.violated.iter().enumerate() {
                if i > 0 {
                    json.push(',');
                }
                push_string(&mut json, name);
            }
            json.push(']');
        }
        json.push('}');
        json
    }
}

/// Appends a JSON string (RFC 8259).
fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' => json.push_str(r#"\""#),
            '\\' => json.push_str(r"\\"),
            '\0'..='\u{1f}' => {
                // Writing to a String cannot fail.
                let _ = write!(json, "\\u{:04x}", u32::from(character));
            }
            _ => json.push(character),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn json_string_round_trips_any_text(text in prop::collection::vec(any::<char>(), 0..40)) {
            let text: String = ['"', '\\', '/', '\0', '\n', '\u{1f}', '\u{7f}', 'ß'].into_iter().chain(text).collect();
            let mut json = String::new();
            push_string(&mut json, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap_or_default(), text);
        }
    }

    #[test]
    fn problem_json_has_members_of_its_type() {
        let status = StatusCode::TOO_MANY_REQUESTS;
        let problem =
            Problem { kind: Kind::QuotaExceeded, status, detail: "slow down", violated: vec![r#"a"b"#, r"c\"] };
        let expected = concat!(
            r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
            r#""title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"#,
            r#""detail":"slow down","violated-policies":["a\"b","c\\"]}"#,
        );
        assert_eq!(problem.to_json(), expected);
        let blank = Problem { kind: Kind::Blank, status: StatusCode::FORBIDDEN, detail: "no", violated: vec![] };
        assert_eq!(blank.to_json(), r#"{"type":"about:blank","title":"Forbidden","status":403,"detail":"no"}"#);
    }
}
