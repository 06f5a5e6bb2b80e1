use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rules are invalid or cannot be read.
///
/// Its text has the form `rules.toml:4:11: policies.api.limits[1].burst: only a token bucket takes a burst`. Unknown parts are omitted.
#[derive(Clone)]
pub struct RulesError {
    message: String,
    field: Option<String>,
    position: Option<(usize, usize)>,
    file: Option<PathBuf>,
    source: Option<Arc<io::Error>>,
}

impl RulesError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), field: None, position: None, file: None, source: None }
    }

    pub(super) fn unreadable(error: io::Error) -> Self {
        Self { source: Some(Arc::new(error)), ..Self::new("cannot read the file") }
    }

    /// Sets the path of the invalid value in the document.
    pub(super) fn in_field(mut self, field: String) -> Self {
        self.field = (!field.is_empty()).then_some(field);
        self
    }

    /// Sets the position from a byte offset in `text`.
    pub(super) fn at(mut self, text: &str, offset: usize) -> Self {
        let before = text.get(..offset.min(text.len())).unwrap_or(text);
        let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        self.position = Some((line, column));
        self
    }

    pub(super) fn in_file(mut self, file: &Path) -> Self {
        self.file = Some(file.to_owned());
        self
    }

    /// The error without its file, position and field.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The path of the invalid value in the document, such as `policies.api.limits[1].burst`. `None` if the error concerns the whole
    /// document, or if no field can be named, as with a syntax error.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }

    /// The line, counted from 1.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.position.map(|(line, _)| line)
    }

    /// The column in characters, counted from 1.
    #[must_use]
    pub fn column(&self) -> Option<usize> {
        self.position.map(|(_, column)| column)
    }

    /// The file, if the rules came from one.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

impl fmt::Display for RulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.position) {
            (Some(file), Some((line, column))) => write!(f, "{}:{line}:{column}: ", file.display())?,
            (Some(file), None) => write!(f, "{}: ", file.display())?,
            (None, Some((line, column))) => write!(f, "line {line}, column {column}: ")?,
            (None, None) => {}
        }
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Debug for RulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RulesError")
            .field("message", &self.message)
            .field("field", &self.field)
            .field("line", &self.line())
            .field("column", &self.column())
            .field("file", &self.file)
            .field("source", &self.source)
            .finish()
    }
}

impl Error for RulesError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|error| &**error as _)
    }
}
