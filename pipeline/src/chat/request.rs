//! A chat request, typed: what cannot be said in the format cannot be said here.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Messages and how to answer them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatRequest {
    /// The conversation, oldest first.
    pub messages: Vec<Message>,
    /// Tools that the model may call, as JSON objects.
    #[serde(default)]
    pub tools: Vec<Map<String, Value>>,
    /// Whether the model must call one.
    #[serde(default)]
    pub tool_choice: ToolChoice,
    /// What the response must look like.
    #[serde(default)]
    pub response_format: ResponseFormat,
    /// Whether the model thinks before it responds.
    #[serde(default = "yes")]
    pub thinking: bool,
    /// How much it thinks; without `thinking` it says nothing.
    #[serde(default)]
    pub thinking_effort: Option<ThinkingEffort>,
    /// What stands for each image placeholder of the contents, in order; special tokens in it count.
    #[serde(default)]
    pub image_prompts: Vec<String>,
    /// Whether the answer's opening follows the messages.
    #[serde(default = "yes")]
    pub add_generation_prompt: bool,
}

impl ChatRequest {
    /// A request to answer `messages`, everything else as by default: thinking, no tools.
    #[must_use]
    pub fn new(messages: Vec<Message>) -> Self {
        Self {
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            thinking: true,
            thinking_effort: None,
            image_prompts: Vec::new(),
            add_generation_prompt: true,
        }
    }
}

fn yes() -> bool {
    true
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "role",
    rename_all = "lowercase",
    deny_unknown_fields,
    expecting = "a message: an object with role and content"
)]
pub enum Message {
    /// Instructions.
    System {
        /// The text.
        content: String,
        /// Who speaks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// A person's message.
    User {
        /// The text.
        content: String,
        /// Who speaks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// An earlier answer of the model.
    Assistant {
        /// The response; may be absent beside tool calls.
        #[serde(default)]
        content: Option<String>,
        /// Who speaks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it thought.
        #[serde(default, alias = "reasoning", skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<String>,
        /// The tools it called.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall>,
    },
    /// A tool's result.
    Tool {
        /// The text.
        content: String,
        /// The call that it answers: an id among the last assistant message's calls.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tool_call_id: Option<String>,
        /// The tool's name; needed where no id is given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tool: Option<String>,
    },
}

impl Message {
    /// A person's message.
    #[must_use]
    pub fn user(content: impl Into<String>) -> Self {
        Self::User { content: content.into(), name: None }
    }

    /// Instructions.
    #[must_use]
    pub fn system(content: impl Into<String>) -> Self {
        Self::System { content: content.into(), name: None }
    }
}

/// A call of a tool by the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// Names the call for its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always a function.
    #[serde(default, rename = "type")]
    pub kind: ToolKind,
    /// What is called.
    pub function: FunctionCall,
}

/// The one kind of tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolKind {
    /// A function with named arguments.
    #[default]
    Function,
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionCall {
    /// Its name.
    pub name: String,
    /// Its arguments by name.
    pub arguments: Arguments,
}

/// Arguments as a JSON object or as the text of one; an empty text is no arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Arguments {
    /// The object.
    Object(Map<String, Value>),
    /// Its text.
    Text(String),
}

/// Whether the model must call a tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// It must.
    Required,
}

/// What the response must look like.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ResponseFormat {
    /// Free text.
    #[default]
    Text,
    /// JSON that fits a schema.
    JsonSchema {
        /// The schema.
        json_schema: JsonSchema,
    },
}

/// A named JSON schema. The model is told the schema alone.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JsonSchema {
    /// Its name.
    pub name: String,
    /// The schema.
    pub schema: Map<String, Value>,
    /// Accepted as other programs send it; changes nothing.
    #[serde(default)]
    pub strict: Option<bool>,
}

/// How much the model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ThinkingEffort {
    /// Little.
    Low,
    /// Much.
    High,
    /// As much as it can.
    Max,
}

impl ThinkingEffort {
    /// As the format spells it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Max => "max",
        }
    }
}

impl std::str::FromStr for ThinkingEffort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "low" => Ok(Self::Low),
            "high" => Ok(Self::High),
            "max" => Ok(Self::Max),
            _ => Err(format!("thinking effort {text:?}: expected low, high or max")),
        }
    }
}
