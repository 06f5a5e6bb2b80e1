//! A parsed document of any format, with the positions of its values.

use std::fmt::{self, Write as _};

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// The maximum nesting of lists and tables. Rules need seven levels, including the document.
pub(super) const MAX_DEPTH: usize = 32;

/// A value and its byte offset.
#[derive(Clone, Debug)]
pub(super) struct Located {
    pub(super) offset: usize,
    pub(super) value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    /// A value that no field takes, such as a date or a number that is too large. The text describes it in errors.
    Other(&'static str),
    List(Vec<Located>),
    Table(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) offset: usize,
    pub(super) node: Located,
}

/// A step from a value to a nested value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PathSegment {
    Name(String),
    Index(usize),
}

impl From<&str> for PathSegment {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl From<usize> for PathSegment {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// Formats a path, such as `policies.api.limits[1]`.
pub(super) fn path(segments: &[PathSegment]) -> String {
    let mut path = String::new();
    for segment in segments {
        let bare = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        let dot = if path.is_empty() { "" } else { "." };
        let written = match segment {
            PathSegment::Name(name) if bare(name) && !name.is_empty() => write!(path, "{dot}{name}"),
            PathSegment::Name(name) => write!(path, "{dot}{name:?}"),
            PathSegment::Index(index) => write!(path, "[{index}]"),
        };
        written.expect("writing to a string cannot fail");
    }
    path
}

impl Located {
    /// The offset of the value at this path, or of its deepest parent that exists.
    pub(super) fn locate(&self, path: &[PathSegment]) -> usize {
        let Some((segment, rest)) = path.split_first() else { return self.offset };
        match (segment, &self.value) {
            (PathSegment::Name(name), Value::Table(entries)) => {
                match entries.iter().find(|entry| entry.name == *name) {
                    // In TOML a table may be spread over the document, so its name is the better position.
                    Some(entry) if rest.is_empty() && matches!(entry.node.value, Value::Table(_)) => entry.offset,
                    Some(entry) => entry.node.locate(rest),
                    None => self.offset,
                }
            }
            (PathSegment::Index(index), Value::List(nodes)) => {
                nodes.get(*index).map_or(self.offset, |node| node.locate(rest))
            }
            _ => self.offset,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct ParseError {
    pub(super) message: String,
    /// The path of the value, with the last segment first.
    reversed_path: Vec<PathSegment>,
    pub(super) offset: Option<usize>,
}

impl ParseError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), reversed_path: Vec::new(), offset: None }
    }

    pub(super) fn at(mut self, offset: usize) -> Self {
        self.offset.get_or_insert(offset);
        self
    }

    pub(super) fn within(mut self, segment: impl Into<PathSegment>) -> Self {
        self.reversed_path.push(segment.into());
        self
    }

    pub(super) fn path(&self) -> Vec<PathSegment> {
        self.reversed_path.iter().rev().cloned().collect()
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ParseError {}

impl serde::de::Error for ParseError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }
}

impl<'de> Deserializer<'de> for &'de Located {
    type Error = ParseError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ParseError> {
        let visited = match &self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Integer(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => visitor.visit_u64(value),
                (_, Ok(value)) => visitor.visit_i64(value),
                _ => visitor.visit_i128(*value),
            },
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::Other(kind) => Err(ParseError::invalid_type(Unexpected::Other(kind), &visitor)),
            Value::List(nodes) => visitor.visit_seq(ListAccess { nodes, next: 0 }),
            Value::Table(entries) => {
                let mut fields = TableAccess { entries, value: None };
                visitor.visit_map(&mut fields).and_then(|value| fields.end().map(|()| value))
            }
        };
        visited.map_err(|error| error.at(self.offset))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ParseError> {
        match self.value {
            // A null is refused: it may be a mistake, and the default of the field may match too much, such as all methods.
            Value::Null => Err(ParseError::new("missing value: leave the field out for its default").at(self.offset)),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, ParseError> {
        visitor.visit_newtype_struct(self).map_err(|error| error.at(self.offset))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ParseError> {
        let visited = match &self.value {
            Value::Text(name) => visitor.visit_enum(name.as_str().into_deserializer()),
            Value::Table(entries) => match entries.as_slice() {
                [entry] => visitor.visit_enum(Variant { entry }),
                _ => Err(ParseError::new(format!("expected a table with one field, found {} fields", entries.len()))),
            },
            _ => return self.deserialize_any(visitor),
        };
        visited.map_err(|error| error.at(self.offset))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map struct identifier ignored_any
    }
}

struct ListAccess<'de> {
    nodes: &'de [Located],
    next: usize,
}

impl<'de> SeqAccess<'de> for ListAccess<'de> {
    type Error = ParseError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ParseError> {
        let index = self.next;
        let Some(node) = self.nodes.get(index) else { return Ok(None) };
        self.next += 1;
        seed.deserialize(node).map(Some).map_err(|error| error.at(node.offset).within(index))
    }
}

struct TableAccess<'de> {
    entries: &'de [Entry],
    value: Option<&'de Entry>,
}

impl TableAccess<'_> {
    /// Refuses fields that were not read.
    fn end(&self) -> Result<(), ParseError> {
        match self.entries.first() {
            None => Ok(()),
            Some(Entry { name, offset, .. }) => {
                Err(ParseError::new(format!("unexpected field `{name}`")).at(*offset).within(name.as_str()))
            }
        }
    }
}

impl<'de> MapAccess<'de> for &mut TableAccess<'de> {
    type Error = ParseError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ParseError> {
        let Some((entry, rest)) = self.entries.split_first() else { return Ok(None) };
        (self.entries, self.value) = (rest, Some(entry));
        let name: StrDeserializer<'_, ParseError> = entry.name.as_str().into_deserializer();
        seed.deserialize(name).map(Some).map_err(|error| error.at(entry.offset).within(entry.name.as_str()))
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, ParseError> {
        let Some(entry) = self.value.take() else { return Err(ParseError::new("a value without a name")) };
        entry.deserialize(seed)
    }
}

impl Entry {
    fn deserialize<'de, T: DeserializeSeed<'de>>(&'de self, seed: T) -> Result<T::Value, ParseError> {
        seed.deserialize(&self.node).map_err(|error| error.at(self.node.offset).within(self.name.as_str()))
    }
}

/// An enum variant with a value, such as `{ percent = 10 }`.
struct Variant<'de> {
    entry: &'de Entry,
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = ParseError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), ParseError> {
        let Entry { name, offset, .. } = self.entry;
        let deserializer: StrDeserializer<'_, ParseError> = name.as_str().into_deserializer();
        let variant = seed.deserialize(deserializer).map_err(|error| error.at(*offset).within(name.as_str()))?;
        Ok((variant, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = ParseError;

    fn unit_variant(self) -> Result<(), ParseError> {
        let Entry { name, offset, .. } = self.entry;
        Err(ParseError::new(format!("`{name}` takes no value: write it as text")).at(*offset).within(name.as_str()))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, ParseError> {
        self.entry.deserialize(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, ParseError> {
        self.unit_variant().and(Err(ParseError::new("not a variant with fields")))
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], _: V) -> Result<V::Value, ParseError> {
        self.unit_variant().and(Err(ParseError::new("not a variant with fields")))
    }
}
