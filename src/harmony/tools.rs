//! Tools as the model was trained to read them: a namespace of TypeScript types, made of JSON schemas.
//!
//! The rules, odd ones included, are those of openai-harmony 0.0.8; each of them shows in the tokens.

use super::json::Json;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: String,
    /// The schema of its arguments; without one it has none.
    pub parameters: Option<Json>,
}

/// The section of a developer message that declares tools.
pub fn section(tools: &[Tool]) -> String {
    let mut lines = vec!["# Tools\n\n## functions\n\nnamespace functions {\n".to_owned()];
    for tool in tools {
        lines.extend(tool.description.lines().map(|line| format!("// {line}")));
        let arguments = match &tool.parameters {
            Some(schema) => format!("_: {}", type_of(schema, "")),
            None => String::new(),
        };
        lines.push(format!("type {} = ({arguments}) => any;\n", tool.name));
    }
    lines.push("} // namespace functions".into());
    lines.join("\n")
}

/// A type in TypeScript; lines after its first begin with `indent`.
fn type_of(schema: &Json, indent: &str) -> String {
    if let Some(variants) = schema.get("oneOf").and_then(Json::list) {
        let variant = |variant: &Json| {
            let kind = nullable(variant, type_of(variant, &format!("{indent}   ")));
            // Of named values a default has quotes here, and where a property has variants it has none.
            let default = variant.get("default").map(|default| match has_values(variant) {
                true => format!("default: {default}"),
                false => described_default(variant, default),
            });
            let description = text(variant, "description").map(str::to_owned);
            format!(
                "\n{indent} | {kind}{}",
                trailing(description.into_iter().chain(default))
            )
        };
        return variants.iter().map(variant).collect();
    }
    match schema.get("type") {
        Some(Json::List(kinds)) => {
            let name = |kind: &str| {
                if kind == "integer" {
                    "number".into()
                } else {
                    kind.to_owned()
                }
            };
            let names: Vec<_> = kinds.iter().filter_map(Json::text).map(name).collect();
            if names.is_empty() {
                "any".into()
            } else {
                names.join(" | ")
            }
        }
        Some(Json::Text(kind)) => match kind.as_str() {
            "object" => object(schema, indent),
            "string" => values(schema).unwrap_or("string".into()),
            "number" | "integer" => "number".into(),
            "boolean" => "boolean".into(),
            "array" => match schema.get("items") {
                Some(items) => type_of(items, indent) + "[]",
                None => "Array<any>".into(),
            },
            _ => "any".into(),
        },
        _ => "any".into(),
    }
}

fn object(schema: &Json, indent: &str) -> String {
    let mut out = String::new();
    if let Some(description) = text(schema, "description") {
        out += &format!("{indent}// {description}\n");
    }
    out += "{\n";
    let required = schema.get("required").and_then(Json::list).unwrap_or_default();
    if let Some(Json::Object(properties)) = schema.get("properties") {
        for (name, property) in properties {
            let is_required = required.iter().any(|required| required.text() == Some(name));
            let name = format!("{name}{}", if is_required { "" } else { "?" });
            out += &self::property(&name, property, indent);
        }
    }
    out + indent + "}"
}

/// A property with the comments above it, and the end of its line.
fn property(name: &str, schema: &Json, indent: &str) -> String {
    let mut out = String::new();
    let mut comment = |text: &str| out += &format!("{indent}// {text}\n");
    let description = text(schema, "description");
    if let Some(title) = text(schema, "title") {
        comment(&format!("{title}\n{indent}//"));
    }
    if let Some(description) = description.filter(|_| schema.get("oneOf").is_none()) {
        comment(description);
    }
    if let Some(examples) = schema
        .get("examples")
        .and_then(Json::list)
        .filter(|all| !all.is_empty())
    {
        comment("Examples:");
        examples
            .iter()
            .filter_map(Json::text)
            .for_each(|example| comment(&format!("- \"{example}\"")));
    }
    let default = schema.get("default").map(|default| described_default(schema, default));
    let Some(variants) = schema.get("oneOf").and_then(Json::list) else {
        let kind = nullable(schema, type_of(schema, &format!("{indent}    ")));
        let default = default.filter(|_| schema.get("oneOf").is_none());
        return out + &format!("{indent}{name}: {kind},{}\n", trailing(default));
    };
    let of_first = variants.first().and_then(|first| text(first, "description"));
    let above = description.filter(|_| description != of_first);
    above.into_iter().for_each(&mut comment);
    default.iter().for_each(|default| comment(default));
    out += &format!("{indent}{name}:\n");
    for (at, variant) in variants.iter().enumerate() {
        let kind = nullable(variant, type_of(variant, &format!("{indent}   ")));
        let own = text(variant, "description").filter(|_| at > 0 || above.is_none());
        let own = own.filter(|own| Some(*own) != description).map(str::to_owned);
        let default = variant
            .get("default")
            .map(|default| described_default(variant, default));
        out += &format!("{indent} | {kind}{}\n", trailing(own.into_iter().chain(default)));
    }
    out + indent + ",\n"
}

/// A field that is a text.
fn text<'a>(schema: &'a Json, name: &str) -> Option<&'a str> {
    schema.get(name)?.text()
}

/// Comments behind a type, on its line.
fn trailing(comments: impl IntoIterator<Item = String>) -> String {
    let comments: Vec<_> = comments.into_iter().collect();
    if comments.is_empty() {
        return String::new();
    }
    format!(" // {}", comments.join(" "))
}

/// The type, or null if the schema says so.
fn nullable(schema: &Json, kind: String) -> String {
    match schema.get("nullable") {
        Some(Json::Bool(true)) if !kind.contains("null") => kind + " | null",
        _ => kind,
    }
}

/// A default value: a text within quotes, unless it is one of several that are named.
fn described_default(schema: &Json, default: &Json) -> String {
    match (default.text(), has_values(schema)) {
        (Some(text), true) => format!("default: {text}"),
        (Some(text), false) => format!("default: \"{text}\""),
        (None, _) => format!("default: {default}"),
    }
}

/// Whether the schema names the values that there may be.
fn has_values(schema: &Json) -> bool {
    schema
        .get("enum")
        .and_then(Json::list)
        .is_some_and(|values| !values.is_empty())
}

/// The texts that there may be, if the schema names any.
fn values(schema: &Json) -> Option<String> {
    let values = schema.get("enum")?.list()?.iter().filter_map(Json::text);
    let values: Vec<_> = values.map(|value| format!("\"{value}\"")).collect();
    (!values.is_empty()).then(|| values.join(" | "))
}
