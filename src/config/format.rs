//! Parses TOML, YAML and JSON into the same tree.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use ::toml::Spanned;
use ::toml::de::{DeInteger, DeTable, DeValue};
use granit_parser::{Event, Parser, ScalarStyle};
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;
use toml_parser::parser::{Event as TomlEvent, EventKind, RecursionGuard};

use super::tree::{Entry, Located, MAX_DEPTH, ParseError, Value};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Toml,
    Yaml,
    Json,
}

impl Format {
    /// The format of a file, from its extension.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "toml" => Some(Self::Toml),
            "yaml" | "yml" => Some(Self::Yaml),
            "json" => Some(Self::Json),
            _ => None,
        }
    }

    pub(super) fn parse(self, text: &str) -> Result<Located, ParseError> {
        match self {
            Self::Toml => toml(text),
            Self::Yaml => yaml(text),
            Self::Json => json(text),
        }
    }
}

fn too_deep(offset: usize) -> ParseError {
    ParseError::new(format!("lists and tables are nested more than {MAX_DEPTH} levels deep")).at(offset)
}

fn given_twice(name: &str, offset: usize) -> ParseError {
    ParseError::new(format!("`{name}` is given twice")).at(offset).within(name)
}

// TOML.

fn toml(text: &str) -> Result<Located, ParseError> {
    if let Some(offset) = too_deep_toml(text) {
        return Err(too_deep(offset));
    }
    let table = DeTable::parse(text).map_err(|error| {
        let parse_error = ParseError::new(error.message().replace('\n', ", "));
        error.span().map_or(parse_error.clone(), |span| parse_error.at(span.start))
    })?;
    let offset = table.span().start;
    from_table(table.into_inner(), offset, 0)
}

/// The offset at which tables are nested too deeply.
///
/// Dropping deeply nested tables could overflow the stack. Each part of a dotted key is a level, and the crate `toml` allows eighty parts at
/// each of eighty levels.
fn too_deep_toml(text: &str) -> Option<usize> {
    let mut found = None;
    // The current depth, and the depths of the open lists and tables around it.
    let (mut depth, mut open) = (0, vec![0]);
    let mut on_event = |event: TomlEvent| {
        match event.kind() {
            EventKind::StdTableOpen | EventKind::ArrayTableOpen => depth = 1,
            EventKind::StdTableClose | EventKind::ArrayTableClose => open = vec![depth],
            EventKind::KeySep => depth += 1,
            EventKind::InlineTableOpen | EventKind::ArrayOpen => {
                depth += 1;
                open.push(depth);
            }
            EventKind::InlineTableClose | EventKind::ArrayClose => drop(open.pop()),
            EventKind::ValueSep | EventKind::Newline => depth = open.last().copied().unwrap_or(0),
            _ => {}
        }
        if depth > MAX_DEPTH {
            found.get_or_insert(event.span().start());
        }
    };
    let tokens = toml_parser::Source::new(text).lex().into_vec();
    // Other errors are reported by the parser that reads the document.
    toml_parser::parser::parse_document(&tokens, &mut RecursionGuard::new(&mut on_event, MAX_DEPTH as u32), &mut ());
    found
}

fn from_table(table: DeTable<'_>, offset: usize, depth: usize) -> Result<Located, ParseError> {
    if depth > MAX_DEPTH {
        return Err(too_deep(offset));
    }
    let entries = table.into_iter().map(|(name, value)| {
        let (offset, name) = (name.span().start, name.into_inner().into_owned());
        let node = from_toml(value, depth).map_err(|error| error.within(name.as_str()))?;
        Ok(Entry { name, offset, node })
    });
    let entries: Result<Vec<Entry>, ParseError> = entries.collect();
    Ok(Located { offset, value: Value::Table(entries?) })
}

fn from_toml(value: Spanned<DeValue<'_>>, depth: usize) -> Result<Located, ParseError> {
    let offset = value.span().start;
    let value = match value.into_inner() {
        DeValue::Table(table) => return from_table(table, offset, depth + 1),
        DeValue::Array(_) if depth >= MAX_DEPTH => return Err(too_deep(offset)),
        DeValue::Array(values) => {
            let node = |(i, value)| from_toml(value, depth + 1).map_err(|error| error.within(i));
            Value::List(values.into_iter().enumerate().map(node).collect::<Result<_, _>>()?)
        }
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(integer) => toml_integer(&integer),
        DeValue::Float(float) => float.as_str().parse().map_or(Value::Other("a number"), Value::Float),
        DeValue::Boolean(value) => Value::Bool(value),
        DeValue::Datetime(_) => Value::Other("a date or time"),
    };
    Ok(Located { offset, value })
}

fn toml_integer(integer: &DeInteger<'_>) -> Value {
    i128::from_str_radix(integer.as_str(), integer.radix()).map_or(Value::Other("a number this large"), Value::Integer)
}

// JSON.

fn json(text: &str) -> Result<Located, ParseError> {
    // Parse the whole document first, so that serde_json reports a syntax error with its line in the document.
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| json_error(text, 0, &error))?;
    from_json(text, raw.get(), 0)
}

/// An error in `piece`, which begins at `start` in the document.
fn json_error(piece: &str, start: usize, error: &serde_json::Error) -> ParseError {
    let line_start = piece.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
    // The message ends with the position, which is relative to the piece.
    let message = error.to_string();
    let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
    let mut offset = (line_start + error.column().saturating_sub(1)).min(piece.len());
    while !piece.is_char_boundary(offset) {
        offset -= 1;
    }
    ParseError::new(message).at(start + offset)
}

fn from_json(text: &str, piece: &str, depth: usize) -> Result<Located, ParseError> {
    // Each piece is a slice of the text, so the difference of their addresses is its offset.
    let offset = (piece.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    let parse_error = |error| json_error(piece, offset, &error);
    let value = match piece.as_bytes().first() {
        Some(b'{' | b'[') if depth >= MAX_DEPTH => return Err(too_deep(offset)),
        Some(b'{') => {
            let fields: JsonFields<'_> = serde_json::from_str(piece).map_err(parse_error)?;
            let mut seen = HashSet::with_capacity(fields.0.len());
            let mut entries = Vec::with_capacity(fields.0.len());
            for (name, raw) in fields.0 {
                let at = (raw.get().as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
                if !seen.insert(name.clone()) {
                    return Err(given_twice(&name, at));
                }
                let node = from_json(text, raw.get(), depth + 1).map_err(|error| error.within(name.as_ref()))?;
                // serde_json does not report the offset of the name, so search for it before the value.
                let before = text[..at].trim_end().trim_end_matches(':').trim_end();
                let quoted = before.len().saturating_sub(name.len() + 2);
                let is_name = before.get(quoted..).is_some_and(|quoted| quoted.trim_matches('"') == name);
                let at = if is_name { quoted } else { at };
                entries.push(Entry { name: name.into_owned(), offset: at, node });
            }
            Value::Table(entries)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(piece).map_err(parse_error)?;
            let node =
                |(i, raw): (usize, &RawValue)| from_json(text, raw.get(), depth + 1).map_err(|error| error.within(i));
            Value::List(items.into_iter().enumerate().map(node).collect::<Result<_, _>>()?)
        }
        Some(b'"') => Value::Text(serde_json::from_str(piece).map_err(parse_error)?),
        Some(b't') => Value::Bool(true),
        Some(b'f') => Value::Bool(false),
        Some(b'n') => Value::Null,
        _ => match (piece.parse(), piece.parse()) {
            (Ok(integer), _) => Value::Integer(integer),
            (_, Ok(float)) => Value::Float(float),
            _ => Value::Other("a number"),
        },
    };
    Ok(Located { offset, value })
}

/// All fields of an object in order, including duplicates.
struct JsonFields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for JsonFields<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = JsonFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry::<Cow<'de, str>, &'de RawValue>()? {
                    fields.push(field);
                }
                Ok(JsonFields(fields))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

// YAML.

/// The maximum total size of the data that aliases expand to and anchors hold. Each value and each byte of text counts as 1.
const MAX_ALIASED: usize = 1 << 20;

fn yaml(text: &str) -> Result<Located, ParseError> {
    let mut composer = Composer::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let marker = error.marker();
            let parse_error = ParseError::new(error.info());
            parse_error.at(marker.byte_offset().unwrap_or_else(|| offset_of(text, marker.line(), marker.col())))
        })?;
        composer.event(event, span.start.byte_offset().unwrap_or_default())?;
    }
    composer.document.ok_or_else(|| ParseError::new("the document is empty"))
}

/// The byte offset of a line, counted from 1, and a column, counted from 0.
fn offset_of(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    start + text[start..].chars().take(column).map(char::len_utf8).sum::<usize>()
}

#[derive(Default)]
struct Composer {
    document: Option<Located>,
    open: Vec<Open>,
    anchors: HashMap<usize, (Located, usize)>,
    aliased: usize,
}

/// A list or table whose end has not been parsed.
struct Open {
    offset: usize,
    anchor: usize,
    /// The number of values and bytes in it.
    size: usize,
    kind: OpenKind,
}

enum OpenKind {
    List(Vec<Located>),
    Table { entries: Vec<Entry>, names: HashSet<String>, name: Option<(String, usize)> },
}

impl Composer {
    fn event(&mut self, event: Event<'_>, offset: usize) -> Result<(), ParseError> {
        match event {
            Event::DocumentStart(..) if self.document.is_some() => {
                Err(ParseError::new("the file has more than one document").at(offset))
            }
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, _, Some(_))
            | Event::MappingStart(_, _, Some(_)) => Err(ParseError::new("tags are not supported").at(offset)),
            Event::Scalar(text, style, anchor, None) => {
                let size = 1 + text.len();
                let value = if style == ScalarStyle::Plain { plain(&text) } else { Value::Text(text.into_owned()) };
                self.complete(Located { offset, value }, anchor, size)
            }
            Event::SequenceStart(_, anchor, None) => self.begin(offset, anchor, OpenKind::List(Vec::new())),
            Event::MappingStart(_, anchor, None) => {
                let table = OpenKind::Table { entries: Vec::new(), names: HashSet::new(), name: None };
                self.begin(offset, anchor, table)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { offset, anchor, size, kind }) = self.open.pop() else { return Ok(()) };
                let value = match kind {
                    OpenKind::List(nodes) => Value::List(nodes),
                    OpenKind::Table { entries, .. } => Value::Table(entries),
                };
                self.complete(Located { offset, value }, anchor, size)
            }
            Event::Alias(anchor) => {
                let Some((node, size)) = self.anchors.get(&anchor) else {
                    return Err(ParseError::new("an alias refers to a value that contains it").at(offset));
                };
                self.aliased = self.aliased.saturating_add(*size);
                if self.aliased > MAX_ALIASED || self.open.len() + depth(node) > MAX_DEPTH {
                    return Err(ParseError::new("aliases expand to too much data").at(offset));
                }
                let (node, size) = (Located { offset, value: node.value.clone() }, *size);
                self.complete(node, 0, size)
            }
            _ => Ok(()),
        }
    }

    fn begin(&mut self, offset: usize, anchor: usize, kind: OpenKind) -> Result<(), ParseError> {
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep(offset));
        }
        self.open.push(Open { offset, anchor, size: 1, kind });
        Ok(())
    }

    /// Adds a complete value to its parent.
    fn complete(&mut self, node: Located, anchor: usize, size: usize) -> Result<(), ParseError> {
        if anchor != 0 {
            // Nested anchors copy a value once for each level, so limit their total size.
            self.aliased = self.aliased.saturating_add(size);
            if self.aliased > MAX_ALIASED {
                return Err(ParseError::new("anchors hold too much data").at(node.offset));
            }
            self.anchors.insert(anchor, (node.clone(), size));
        }
        let Some(parent) = self.open.last_mut() else {
            self.document = Some(node);
            return Ok(());
        };
        parent.size = parent.size.saturating_add(size);
        match &mut parent.kind {
            OpenKind::List(nodes) => nodes.push(node),
            OpenKind::Table { entries, names, name } => match (name.take(), node.value) {
                (Some((name, offset)), value) => {
                    entries.push(Entry { name, offset, node: Located { offset: node.offset, value } });
                }
                (None, value) => {
                    let text = match value {
                        Value::Text(text) => text,
                        Value::Integer(number) => number.to_string(),
                        Value::Bool(value) => value.to_string(),
                        _ => return Err(ParseError::new("a field name must be text").at(node.offset)),
                    };
                    if !names.insert(text.clone()) {
                        return Err(given_twice(&text, node.offset));
                    }
                    *name = Some((text, node.offset));
                }
            },
        }
        Ok(())
    }
}

/// The number of nested levels of lists and tables in a value.
fn depth(node: &Located) -> usize {
    match &node.value {
        Value::List(nodes) => 1 + nodes.iter().map(depth).max().unwrap_or(0),
        Value::Table(entries) => 1 + entries.iter().map(|entry| depth(&entry.node)).max().unwrap_or(0),
        _ => 0,
    }
}

/// Parses unquoted text by the core schema of YAML 1.2, in which `no` is text.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let radix = |prefix, radix| i128::from_str_radix(text.strip_prefix(prefix)?, radix).ok();
    let integer = text.parse().ok().or_else(|| radix("0x", 16)).or_else(|| radix("0o", 8));
    let numeric = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    match integer {
        Some(integer) => Value::Integer(integer),
        None if numeric(text) => text.parse().map_or_else(|_| Value::Text(text.to_owned()), Value::Float),
        None => Value::Text(text.to_owned()),
    }
}
