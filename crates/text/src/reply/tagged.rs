//! Calls that name each parameter in markup and give its value as text: Qwen3-Coder, GLM.
//!
//! The values become JSON by the tool's schema, one parameter at a time. A call that breaks off leaves its
//! object open, as one in JSON does, so that half a call is never taken for a whole one.

use serde_json::Value as Json;

use super::format::{Mark, Marks};
use super::header::{NAME_LIMIT, is_name};
use super::output::Output;
use super::{Step, Token, ToolSpec};

/// Schemas within schemas that are looked into for a parameter's types.
const SCHEMA_DEPTH: usize = 8;

const FUNCTION: Marks = &[("<function=", Mark::Function)];
const PARAMETERS: Marks = &[
    ("<parameter=", Mark::Key),
    ("</function>", Mark::CallEnd),
    ("</tool_call>", Mark::CallEnd),
    ("<tool_call>", Mark::Open),
];
// A forgotten end of a value is made good by a line that begins the next, or ends the call.
const QWEN_VALUE: Marks =
    &[("</parameter>", Mark::ValueEnd), ("\n<parameter=", Mark::Key), ("\n</function>", Mark::CallEnd)];
const GLM_PARAMETERS: Marks =
    &[("<arg_key>", Mark::Key), ("</tool_call>", Mark::CallEnd), ("<tool_call>", Mark::Open)];
const GLM_KEY: Marks = &[("</arg_key>", Mark::KeyEnd)];
const GLM_ASSIGN: Marks = &[("<arg_value>", Mark::Value)];
const GLM_VALUE: Marks = &[("</arg_value>", Mark::ValueEnd)];

/// A call, as far as it is read.
#[derive(Clone, Debug)]
pub(super) struct Tagged {
    style: Style,
    part: Part,
    /// The text of the present part.
    text: String,
    name: String,
    key: String,
    /// Parameters passed on.
    written: usize,
    /// Nothing but a tool on offer makes it a call: the marker before it is missing.
    only_offered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// `<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>`
    Qwen,
    /// `NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>`
    Glm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Qwen: before the function.
    Function,
    Name,
    /// Before a parameter or the end.
    Parameters,
    Key,
    /// GLM: between a key and its value.
    Assign,
    Value,
}

impl Tagged {
    fn new(style: Style, part: Part) -> Self {
        let (text, name, key) = (String::new(), String::new(), String::new());
        Tagged { style, part, text, name, key, written: 0, only_offered: false }
    }

    pub(super) fn qwen() -> Self {
        Tagged::new(Style::Qwen, Part::Function)
    }

    /// A call of Qwen's that began with `<function=`.
    pub(super) fn qwen_function() -> Self {
        Tagged { only_offered: true, ..Tagged::new(Style::Qwen, Part::Name) }
    }

    pub(super) fn glm() -> Self {
        Tagged::new(Style::Glm, Part::Name)
    }

    /// The markers that count in the present part.
    pub(super) fn marks(&self) -> Marks {
        match (self.style, self.part) {
            (Style::Qwen, Part::Function) => FUNCTION,
            (Style::Qwen, Part::Parameters) => PARAMETERS,
            (Style::Qwen, Part::Value) => QWEN_VALUE,
            (Style::Qwen, _) => &[],
            (Style::Glm, Part::Name | Part::Parameters) => GLM_PARAMETERS,
            (Style::Glm, Part::Key) => GLM_KEY,
            (Style::Glm, Part::Assign) => GLM_ASSIGN,
            (Style::Glm, Part::Value) => GLM_VALUE,
            (Style::Glm, Part::Function) => &[],
        }
    }

    pub(super) fn take(&mut self, token: Token, out: &mut Output, tools: &[ToolSpec]) -> Step {
        let taken = match (self.part, token) {
            (Part::Value, Token::Char(c)) => {
                self.text.push(c);
                true
            }
            (Part::Value, Token::Mark(Mark::ValueEnd)) => {
                if self.style == Style::Qwen && self.text.ends_with('\n') {
                    self.text.pop();
                }
                self.write(out, tools);
                true
            }
            (Part::Value, Token::Mark(_)) => {
                self.write(out, tools);
                return Step::Again;
            }
            (Part::Function, Token::Mark(Mark::Function)) => {
                self.go_on(Part::Name);
                true
            }
            (Part::Name, Token::Char('>')) if self.style == Style::Qwen => self.begin(out, tools),
            (Part::Name, Token::Mark(Mark::Key | Mark::CallEnd)) => {
                return if self.begin(out, tools) { Step::Again } else { Step::Refuse };
            }
            (Part::Name, Token::Char(c)) => self.take_name(c),
            (Part::Parameters, Token::Mark(Mark::Key)) => {
                self.go_on(Part::Key);
                true
            }
            (Part::Parameters, Token::Mark(Mark::CallEnd)) => {
                out.arguments("}");
                out.end();
                return Step::Done;
            }
            (Part::Key, Token::Char('>')) if self.style == Style::Qwen => self.keyed(Part::Value),
            (Part::Key, Token::Mark(Mark::KeyEnd)) => self.keyed(Part::Assign),
            (Part::Key, Token::Char(c)) => {
                self.text.push(c);
                self.text.len() <= NAME_LIMIT
            }
            (Part::Assign, Token::Mark(Mark::Value)) => {
                self.go_on(Part::Value);
                true
            }
            (Part::Function | Part::Parameters | Part::Assign, Token::Char(c)) => c.is_whitespace(),
            (_, Token::Mark(_)) => false,
        };
        if taken { Step::Stay } else { Step::Refuse }
    }

    /// Whether the next character is a value's.
    pub(super) fn in_value(&self) -> bool {
        self.part == Part::Value
    }

    /// The reply ends here: what there is of a value is passed on, as a string without its end.
    pub(super) fn cut(&mut self, out: &mut Output) {
        if self.in_value() {
            self.write_key(out);
            let value = Json::from(self.value()).to_string();
            out.arguments(&value[..value.len() - 1]);
        }
    }

    fn go_on(&mut self, part: Part) {
        self.text.clear();
        self.part = part;
    }

    /// A character of a name; after white space nothing but markup may follow.
    fn take_name(&mut self, c: char) -> bool {
        let ended = !self.text.is_empty() && self.text.ends_with(char::is_whitespace);
        if c.is_whitespace() {
            // GLM ends the name with a line; one character of white space stands for all.
            if self.style == Style::Glm && !self.text.is_empty() && !ended {
                self.text.push(c);
            }
            return self.style == Style::Glm;
        }
        self.text.push(c);
        !ended && is_name(&self.text)
    }

    fn begin(&mut self, out: &mut Output, tools: &[ToolSpec]) -> bool {
        self.name = self.text.trim().to_owned();
        self.go_on(Part::Parameters);
        if !is_name(&self.name) || (self.only_offered && !tools.iter().any(|tool| tool.name == self.name)) {
            return false;
        }
        out.begin(self.name.clone(), None);
        out.arguments("{");
        true
    }

    fn keyed(&mut self, part: Part) -> bool {
        self.key = self.text.trim().to_owned();
        self.go_on(part);
        !self.key.is_empty()
    }

    /// The value's text: Qwen sets it on lines of its own.
    fn value(&self) -> &str {
        match self.style {
            Style::Qwen => self.text.strip_prefix('\n').unwrap_or(&self.text),
            Style::Glm => &self.text,
        }
    }

    fn write_key(&mut self, out: &mut Output) {
        let comma = if self.written > 0 { ", " } else { "" };
        out.arguments(&format!("{comma}{}: ", Json::from(self.key.as_str())));
        self.written += 1;
    }

    /// Passes on the parameter.
    fn write(&mut self, out: &mut Output, tools: &[ToolSpec]) {
        self.write_key(out);
        let tool = tools.iter().find(|tool| tool.name == self.name);
        let schema = tool.and_then(|tool| tool.parameters.get("properties")?.get(&self.key));
        out.arguments(&to_json(self.value(), schema));
        self.go_on(Part::Parameters);
    }
}

/// A value's text as JSON, by the schema of its parameter.
///
/// Where the schema admits a string, text that is JSON of another admitted type is of that type; without a
/// schema, text that is JSON of any type but string is of that type. Everything else is a string.
fn to_json(text: &str, schema: Option<&Json>) -> String {
    let trimmed = text.trim();
    let types = schema.and_then(|schema| Types::of(schema, SCHEMA_DEPTH)).unwrap_or(Types::ANY);
    let parsed = if types.is_string() { None } else { serde_json::from_str::<Json>(trimmed).ok() };
    match parsed {
        Some(value) if types.admit(&value) => return trimmed.to_owned(),
        // As Python, and so some templates, write them.
        None if !types.string && types.boolean && trimmed == "True" => return "true".to_owned(),
        None if !types.string && types.boolean && trimmed == "False" => return "false".to_owned(),
        None if !types.string && types.null && trimmed == "None" => return "null".to_owned(),
        _ => {}
    }
    Json::from(text).to_string()
}

/// The types that a schema admits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Types {
    string: bool,
    number: bool,
    boolean: bool,
    null: bool,
    array: bool,
    object: bool,
}

impl Types {
    const ANY: Types =
        Types { string: true, number: true, boolean: true, null: true, array: true, object: true };

    /// The types that a schema names; `None` if it names none.
    fn of(schema: &Json, depth: usize) -> Option<Types> {
        let mut types = Types::default();
        match &schema["type"] {
            Json::String(name) => types.add(name),
            Json::Array(names) => names.iter().filter_map(Json::as_str).for_each(|name| types.add(name)),
            _ => {}
        }
        if types == Types::default() {
            let values = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
            values.for_each(|value| types.join(Types::of_value(value)));
        }
        if types == Types::default() && depth > 0 {
            let branches = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema[key].as_array());
            for branch in branches.flatten() {
                types.join(Types::of(branch, depth - 1)?);
            }
        }
        (types != Types::default()).then_some(types)
    }

    fn of_value(value: &Json) -> Types {
        let none = Types::default();
        match value {
            Json::String(_) => Types { string: true, ..none },
            Json::Number(_) => Types { number: true, ..none },
            Json::Bool(_) => Types { boolean: true, ..none },
            Json::Null => Types { null: true, ..none },
            Json::Array(_) => Types { array: true, ..none },
            Json::Object(_) => Types { object: true, ..none },
        }
    }

    fn add(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "number" | "integer" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => {}
        }
    }

    fn join(&mut self, other: Types) {
        self.string |= other.string;
        self.number |= other.number;
        self.boolean |= other.boolean;
        self.null |= other.null;
        self.array |= other.array;
        self.object |= other.object;
    }

    fn is_string(self) -> bool {
        self == Types { string: true, ..Types::default() }
    }

    /// Whether a value that is no string is of an admitted type.
    fn admit(self, value: &Json) -> bool {
        match value {
            Json::String(_) => false,
            Json::Number(_) => self.number,
            Json::Bool(_) => self.boolean,
            Json::Null => self.null,
            Json::Array(_) => self.array,
            Json::Object(_) => self.object,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_becomes_json_by_its_schema() {
        let string = json!({"type": "string"});
        let integer = json!({"type": "integer"});
        let boolean = json!({"type": "boolean"});
        let either = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
        let list = json!({"type": ["array", "null"], "items": {"type": "integer"}});
        let choice = json!({"enum": [1, 2]});
        let unknown = json!({"description": "anything"});
        for (text, schema, expected) in [
            ("12", Some(&string), r#""12""#),
            ("null", Some(&string), r#""null""#),
            (" a\n\"b\" ", Some(&string), r#"" a\n\"b\" ""#),
            ("12", Some(&integer), "12"),
            ("\n12\n", Some(&integer), "12"),
            ("twelve", Some(&integer), r#""twelve""#),
            ("True", Some(&integer), r#""True""#),
            ("true", Some(&boolean), "true"),
            ("False", Some(&boolean), "false"),
            ("null", Some(&either), "null"),
            ("None", Some(&either), r#""None""#),
            ("None", Some(&list), "null"),
            ("12", Some(&either), r#""12""#),
            ("[1, 2]", Some(&list), "[1, 2]"),
            ("[1, 2", Some(&list), r#""[1, 2""#),
            ("2", Some(&choice), "2"),
            ("2", Some(&unknown), "2"),
            ("2.50", None, "2.50"),
            ("{\"a\": [1]}", None, "{\"a\": [1]}"),
            ("\"quoted\"", None, r#""\"quoted\"""#),
            ("plain", None, r#""plain""#),
            ("True", None, r#""True""#),
        ] {
            assert_eq!(to_json(text, schema), expected, "{text:?} by {schema:?}");
        }
    }

    #[test]
    fn deep_schemas_and_values_are_strings_or_anything() {
        let mut schema = json!({"type": "integer"});
        for _ in 0..50 {
            schema = json!({"anyOf": [schema]});
        }
        assert_eq!(to_json("1", Some(&schema)), "1");
        let deep = "[".repeat(100_000);
        assert_eq!(to_json(&deep, None), format!("\"{deep}\""));
    }
}
