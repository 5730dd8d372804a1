//! Calls that name each parameter in markup and give its value as text: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2.
//!
//! The values become JSON by the tool's schema, unless the markup itself says what they are: strings as they come,
//! everything else when it is complete. Of a value that is an object or a list, strings may have the marker that would
//! end it: JSON has no new lines in strings, so one that is never closed ends with its line.
//! A call that breaks off leaves its object open, as one in JSON does, so that half a call is never taken for a whole
//! one.

use serde_json::Value as Json;

use super::arguments::Scanner;
use super::format::{Mark, Marks};
use super::header::{NAME_LIMIT, is_name};
use super::output::Output;
use super::{Step, Token, ToolSpec};
use crate::constrain::{ALTERNATIVES, DEPTH, target};

/// How a format marks a call's parts.
#[derive(Debug)]
pub(super) struct Style {
    /// Before the name; empty where the name follows the call's marker.
    function: Marks,
    /// Within and after the name.
    name: Marks,
    /// Between parameters.
    parameters: Marks,
    key: Marks,
    /// Between a key and its value; empty where nothing stands there.
    assign: Marks,
    /// What ends a value, and what makes good a forgotten end: no value may have it, but a string of JSON.
    pub(super) value: Marks,
    /// What does so even there, as it begins with a new line.
    value_lines: Marks,
    /// The name ends with its line, or at markup.
    named_by_line: bool,
    /// A value stands on lines of its own.
    own_lines: bool,
}

/// `<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>`
pub(super) static QWEN: Style = Style {
    function: &[("<function=", Mark::Function)],
    name: &[(">", Mark::NameEnd)],
    parameters: &[
        ("<parameter=", Mark::Key),
        ("</function>", Mark::CallEnd),
        ("</tool_call>", Mark::CallEnd),
        ("<tool_call>", Mark::Open),
    ],
    key: &[(">", Mark::KeyEnd)],
    assign: &[],
    // A forgotten end of a value is made good by a line that begins the next, or ends the call.
    value: &[
        ("</parameter>", Mark::ValueEnd),
        ("\n<parameter=", Mark::Key),
        ("\n</function>", Mark::CallEnd),
    ],
    value_lines: &[
        ("\n</parameter>", Mark::ValueEnd),
        ("\n<parameter=", Mark::Key),
        ("\n</function>", Mark::CallEnd),
    ],
    named_by_line: false,
    own_lines: true,
};

/// `NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>`
pub(super) static GLM: Style = Style {
    function: &[],
    name: GLM_PARAMETERS,
    parameters: GLM_PARAMETERS,
    key: &[("</arg_key>", Mark::KeyEnd)],
    assign: &[("<arg_value>", Mark::Value)],
    value: &[("</arg_value>", Mark::ValueEnd)],
    value_lines: &[("\n<arg_key>", Mark::Key), ("\n</tool_call>", Mark::CallEnd)],
    named_by_line: true,
    own_lines: false,
};
const GLM_PARAMETERS: Marks =
    &[("<arg_key>", Mark::Key), ("</tool_call>", Mark::CallEnd), ("<tool_call>", Mark::Open)];

/// `<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>`
pub(super) static MINIMAX: Style = Style {
    function: &[("<invoke name=\"", Mark::Function)],
    name: &[("\">", Mark::NameEnd)],
    parameters: &[
        ("<parameter name=\"", Mark::Key),
        ("</invoke>", Mark::CallEnd),
        ("</minimax:tool_call>", Mark::CallEnd),
        ("<minimax:tool_call>", Mark::Open),
    ],
    key: &[("\">", Mark::KeyEnd)],
    assign: &[],
    value: &[
        ("</parameter>", Mark::ValueEnd),
        ("\n<parameter name=\"", Mark::Key),
        ("\n</invoke>", Mark::CallEnd),
        ("</minimax:tool_call>", Mark::CallEnd),
    ],
    value_lines: &[
        ("\n<parameter name=\"", Mark::Key),
        ("\n</invoke>", Mark::CallEnd),
        ("\n</minimax:tool_call>", Mark::CallEnd),
    ],
    named_by_line: false,
    own_lines: false,
};

/// The same with a token of its own in each tag, and with parameters that say whether they are strings.
pub(super) static DSML: Style = Style {
    function: &[("<｜DSML｜invoke name=\"", Mark::Function)],
    name: &[("\">", Mark::NameEnd)],
    parameters: &[
        ("<｜DSML｜parameter name=\"", Mark::Key),
        ("</｜DSML｜invoke>", Mark::CallEnd),
        ("</｜DSML｜function_calls>", Mark::CallEnd),
        ("<｜DSML｜function_calls>", Mark::Open),
    ],
    key: &[
        ("\" string=\"true\">", Mark::StringKeyEnd),
        ("\" string=\"false\">", Mark::JsonKeyEnd),
        ("\">", Mark::KeyEnd),
    ],
    assign: &[],
    value: &[
        ("</｜DSML｜parameter>", Mark::ValueEnd),
        ("<｜DSML｜parameter name=\"", Mark::Key),
        ("</｜DSML｜invoke>", Mark::CallEnd),
        ("</｜DSML｜function_calls>", Mark::CallEnd),
    ],
    value_lines: &[
        ("\n<｜DSML｜parameter name=\"", Mark::Key),
        ("\n</｜DSML｜invoke>", Mark::CallEnd),
        ("\n</｜DSML｜function_calls>", Mark::CallEnd),
    ],
    named_by_line: false,
    own_lines: false,
};

/// A call, as far as it is read.
#[derive(Clone, Debug)]
pub(super) struct Tagged {
    style: &'static Style,
    part: Part,
    /// The text of the present part.
    text: String,
    name: String,
    key: String,
    /// What is known of the present value.
    kind: Kind,
    brackets: Brackets,
    /// Of a string on lines of its own: where its next character stands.
    line: Line,
    /// Parameters passed on.
    written: usize,
    /// Nothing but a tool on offer makes it a call: the marker before it is missing.
    only_offered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Before the function.
    Function,
    Name,
    /// Before a parameter or the end.
    Parameters,
    Key,
    /// Between a key and its value.
    Assign,
    Value,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// What the schema makes of its text.
    BySchema,
    /// A string, which is passed on as it comes.
    String,
    /// JSON, if it can be.
    Json,
}

/// Whether a value is an object or a list, as far as it is read.
#[derive(Clone, Debug)]
enum Brackets {
    Before,
    Within(Scanner),
    /// It is not, or not any more.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// At the beginning: a new line is none of it.
    First,
    Inside,
    /// After a new line, which may be that of the end.
    Break,
}

impl Tagged {
    fn new(style: &'static Style, part: Part) -> Self {
        let (text, name, key) = (String::new(), String::new(), String::new());
        Tagged {
            style,
            part,
            text,
            name,
            key,
            kind: Kind::BySchema,
            brackets: Brackets::None,
            line: Line::First,
            written: 0,
            only_offered: false,
        }
    }

    /// After the marker of a call.
    pub(super) fn marked(style: &'static Style) -> Self {
        Tagged::new(style, if style.function.is_empty() { Part::Name } else { Part::Function })
    }

    /// After what stands before the name.
    pub(super) fn named(style: &'static Style) -> Self {
        Tagged::new(style, Part::Name)
    }

    /// The same without the call's marker: it is a call only if the tool is on offer.
    pub(super) fn perhaps(style: &'static Style) -> Self {
        Tagged { only_offered: true, ..Tagged::named(style) }
    }

    /// The markers that count in the present part.
    pub(super) fn marks(&self) -> Marks {
        match self.part {
            Part::Function => self.style.function,
            Part::Name => self.style.name,
            Part::Parameters => self.style.parameters,
            Part::Key => self.style.key,
            Part::Assign => self.style.assign,
            Part::Value if matches!(&self.brackets, Brackets::Within(json) if json.in_string()) => {
                self.style.value_lines
            }
            Part::Value => self.style.value,
        }
    }

    /// Follows a value that is not known to be a string.
    fn follow(&mut self, c: char) {
        let goes_on = match &mut self.brackets {
            Brackets::None => return,
            Brackets::Before if c.is_whitespace() => return,
            Brackets::Before if matches!(c, '{' | '[') => {
                self.brackets = Brackets::Within(Scanner::after(c));
                return;
            }
            Brackets::Before => false,
            Brackets::Within(json) => (c != '\n' || !json.in_string()) && !json.take(c),
        };
        if !goes_on {
            self.brackets = Brackets::None;
        }
    }

    pub(super) fn take(&mut self, token: Token, out: &mut Output, tools: &[ToolSpec]) -> Step {
        let taken = match (self.part, token) {
            (Part::Value, Token::Char(c)) => {
                match self.kind {
                    Kind::String => self.say(c, out),
                    Kind::BySchema | Kind::Json => {
                        self.follow(c);
                        self.text.push(c);
                    }
                }
                true
            }
            (Part::Value, Token::Mark(Mark::ValueEnd)) => {
                self.line = Line::Inside;
                if self.style.own_lines && self.text.ends_with('\n') {
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
            (Part::Name, Token::Mark(Mark::NameEnd)) => self.begin(out, tools),
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
            (Part::Key, Token::Mark(Mark::KeyEnd)) => self.keyed(Kind::BySchema, out, tools),
            (Part::Key, Token::Mark(Mark::StringKeyEnd)) => self.keyed(Kind::String, out, tools),
            (Part::Key, Token::Mark(Mark::JsonKeyEnd)) => self.keyed(Kind::Json, out, tools),
            (Part::Key, Token::Char(c)) => {
                self.text.push(c);
                self.text.len() <= NAME_LIMIT
            }
            (Part::Assign, Token::Mark(Mark::Value)) => {
                self.begin_value(out);
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
        if self.in_value() && self.kind == Kind::String {
            self.keep_break(out);
        } else if self.in_value() {
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
            // One character of white space stands for all.
            if self.style.named_by_line && !self.text.is_empty() && !ended {
                self.text.push(c);
            }
            return self.style.named_by_line;
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

    fn keyed(&mut self, kind: Kind, out: &mut Output, tools: &[ToolSpec]) -> bool {
        self.key = self.text.trim().to_owned();
        let is_string = || self.types(tools).is_some_and(Types::is_string);
        self.kind = if kind == Kind::BySchema && is_string() { Kind::String } else { kind };
        if self.key.is_empty() {
            return false;
        }
        if self.style.assign.is_empty() {
            self.begin_value(out);
        } else {
            self.go_on(Part::Assign);
        }
        true
    }

    fn begin_value(&mut self, out: &mut Output) {
        self.go_on(Part::Value);
        self.line = Line::First;
        self.brackets = Brackets::Before;
        if self.kind == Kind::String {
            self.write_key(out);
            out.arguments("\"");
        }
    }

    /// Passes on a character of a string.
    fn say(&mut self, c: char, out: &mut Output) {
        if !self.style.own_lines {
            return escape(c, out);
        }
        match (self.line, c) {
            (Line::First, '\n') => self.line = Line::Inside,
            (_, '\n') => {
                self.keep_break(out);
                self.line = Line::Break;
            }
            _ => {
                self.keep_break(out);
                self.line = Line::Inside;
                escape(c, out);
            }
        }
    }

    /// A new line that waited is part of the string.
    fn keep_break(&self, out: &mut Output) {
        if self.line == Line::Break {
            escape('\n', out);
        }
    }

    /// The types of the parameter, if its schema names any.
    fn types(&self, tools: &[ToolSpec]) -> Option<Types> {
        let root = &tools.iter().find(|tool| tool.name == self.name)?.parameters;
        let declared = root["properties"].get(&self.key);
        Types::of(declared.or_else(|| root.get("additionalProperties"))?, root)
    }

    /// The value's text.
    fn value(&self) -> &str {
        let line = self.text.strip_prefix('\n').filter(|_| self.style.own_lines);
        line.unwrap_or(&self.text)
    }

    fn write_key(&mut self, out: &mut Output) {
        let comma = if self.written > 0 { ", " } else { "" };
        out.arguments(&format!("{comma}{}: ", Json::from(self.key.as_str())));
        self.written += 1;
    }

    /// Passes on the parameter, or the end of a string.
    fn write(&mut self, out: &mut Output, tools: &[ToolSpec]) {
        if self.kind == Kind::String {
            self.keep_break(out);
            out.arguments("\"");
        } else {
            self.write_key(out);
            let value = self.value();
            let is_json = self.kind == Kind::Json && serde_json::from_str::<Json>(value.trim()).is_ok();
            out.arguments(&if is_json { value.trim().to_owned() } else { to_json(value, self.types(tools)) });
        }
        self.go_on(Part::Parameters);
    }
}

/// A character within a JSON string.
fn escape(c: char, out: &mut Output) {
    if c < ' ' || matches!(c, '"' | '\\') {
        let quoted = Json::from(c.to_string()).to_string();
        out.arguments(&quoted[1..quoted.len() - 1]);
    } else {
        out.arguments(c.encode_utf8(&mut [0; 4]));
    }
}

/// A value's text as JSON, by the types that the schema of its parameter names.
///
/// Where the schema admits a string, text that is JSON of another admitted type is of that type; without a
/// schema, text that is JSON of any type but string is of that type. Everything else is a string.
fn to_json(text: &str, types: Option<Types>) -> String {
    let trimmed = text.trim();
    let types = types.unwrap_or(Types::ANY);
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

    /// The types that a schema names, itself or by its references into `root`; `None` if it names none, or so many
    /// subschemas that a grammar of the tool would be refused.
    fn of(schema: &Json, root: &Json) -> Option<Types> {
        let mut steps = ALTERNATIVES;
        Types::within(schema, root, DEPTH, &mut steps)
    }

    fn within(schema: &Json, root: &Json, depth: usize, steps: &mut usize) -> Option<Types> {
        *steps = steps.checked_sub(1)?;
        let mut types = Types::default();
        match &schema["type"] {
            Json::String(name) => types.add(name),
            Json::Array(names) => {
                *steps = steps.checked_sub(names.len())?;
                names.iter().filter_map(Json::as_str).for_each(|name| types.add(name));
            }
            _ => {}
        }
        if types == Types::default() {
            let values = schema["enum"].as_array().map_or(&[][..], Vec::as_slice);
            *steps = steps.checked_sub(values.len())?;
            values.iter().chain(schema.get("const")).for_each(|value| types.join(Types::of_value(value)));
        }
        if types == Types::default() && depth > 0 {
            let referred = schema["$ref"].as_str().and_then(|reference| target(root, reference));
            let branches = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema[key].as_array());
            for branch in referred.into_iter().chain(branches.flatten()) {
                types.join(Types::within(branch, root, depth - 1, steps)?);
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
            let types = schema.and_then(|schema| Types::of(schema, schema));
            assert_eq!(to_json(text, types), expected, "{text:?} by {schema:?}");
        }
    }

    #[test]
    fn types_are_found_by_references_and_no_schema_takes_for_ever() {
        let string = Types { string: true, ..Types::default() };
        let root = json!({"$defs": {"zip": {"$ref": "#/$defs/text"}, "text": {"type": "string"}, "me": {"$ref": "#/$defs/me"}}});
        let of = |schema: Json| Types::of(&schema, &root);
        assert_eq!(of(json!({"$ref": "#/$defs/zip"})), Some(string));
        let either = json!({"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]});
        assert_eq!(of(either), Some(Types { null: true, ..string }));
        for unknown in ["#/$defs/me", "#/$defs/nowhere", "elsewhere"] {
            assert_eq!(of(json!({"$ref": unknown})), None, "{unknown}");
        }
        let definitions: serde_json::Map<_, _> = (0..12)
            .map(|n| {
                (format!("d{n}"), json!({"anyOf": vec![json!({"$ref": format!("#/$defs/d{}", n + 1)}); 700]}))
            })
            .chain([("d12".to_owned(), json!({"type": "string"}))])
            .collect();
        let root = json!({ "$defs": definitions });
        assert_eq!(Types::of(&json!({"$ref": "#/$defs/d0"}), &root), None);
    }

    #[test]
    fn deep_schemas_and_values_are_strings_or_anything() {
        let mut schema = json!({"type": "integer"});
        for _ in 0..50 {
            schema = json!({"anyOf": [schema]});
        }
        assert_eq!(to_json("1", Types::of(&schema, &schema)), "1");
        let deep = "[".repeat(100_000);
        assert_eq!(to_json(&deep, None), format!("\"{deep}\""));
    }
}
