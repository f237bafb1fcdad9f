//! JSON whose objects keep the order of their fields: a tool's parameters are rendered in the order in which they were
//! written, which `serde_json`'s own maps do not keep.

use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Number;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(Number),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Json>),
    /// No two fields have one name.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// A field of an object; `None` if it is not there, or this is no object.
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Object(fields) = self else { return None };
        fields.iter().find(|(field, _)| field == name).map(|(_, value)| value)
    }

    /// A field that is there and not null.
    pub fn given(&self, name: &str) -> Option<&Self> {
        self.get(name).filter(|value| **value != Self::Null)
    }

    /// The text that this is.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The number that this is.
    pub fn number(&self) -> Option<&Number> {
        match self {
            Self::Number(number) => Some(number),
            _ => None,
        }
    }

    /// The list that this is.
    pub fn list(&self) -> Option<&[Self]> {
        match self {
            Self::List(list) => Some(list),
            _ => None,
        }
    }
}

/// The value in JSON, without blanks. Exponents have no plus sign, as in what the model was trained on.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |text: &str| serde_json::to_string(text).map_err(|_| fmt::Error);
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Number(number) => f.write_str(&number.to_string().replace("e+", "e")),
            Self::Text(text) => f.write_str(&quoted(text)?),
            Self::List(list) => {
                let values: Vec<_> = list.iter().map(Self::to_string).collect();
                write!(f, "[{}]", values.join(","))
            }
            Self::Object(fields) => {
                let field = |(name, value): &(String, Self)| Ok(format!("{}:{value}", quoted(name)?));
                let fields: Vec<String> = fields.iter().map(field).collect::<Result<_, fmt::Error>>()?;
                write!(f, "{{{}}}", fields.join(","))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Number::from_f64(value).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut fields: Vec<(String, Json)> = Vec::new();
        let mut places = std::collections::HashMap::new();
        while let Some((name, value)) = entries.next_entry::<String, Json>()? {
            // As Python's and JavaScript's readers do: the last value, in the first place.
            match places.get(&name) {
                Some(&at) => fields[at as usize].1 = value,
                None => {
                    places.insert(name.clone(), fields.len() as u32);
                    fields.push((name, value));
                }
            }
        }
        Ok(Json::Object(fields))
    }
}
