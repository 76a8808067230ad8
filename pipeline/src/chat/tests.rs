use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::tests::{released, say, small};
use crate::units::TokenId;

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    request: ChatRequest,
    text: String,
    segments: Vec<(String, bool)>,
    ids: Vec<TokenId>,
}

#[test]
fn the_release_is_matched_to_the_id() {
    let (Some(vocabulary), Some(path)) = (released("tokenizer"), released("chat/cases.json")) else { return };
    let tokenizer = Tokenizer::open(&vocabulary).unwrap();
    let format = ChatFormat::new(&tokenizer).unwrap();
    let cases: Cases = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for case in &cases.cases {
        let segments = segments(&case.request).unwrap();
        let pairs: Vec<(String, bool)> =
            segments.iter().map(|s| (s.text.clone().into_owned(), s.control)).collect();
        assert_eq!(pairs, case.segments, "{}", case.name);
        assert_eq!(pairs.iter().map(|(text, _)| text.as_str()).collect::<String>(), case.text);
        assert_eq!(format.encode(&case.request).unwrap(), case.ids, "{}", case.name);
    }
    say(&format!("chat parity: {} cases equal to the id", cases.cases.len()));
    assert!(cases.cases.len() >= 19);
}

#[test]
fn the_release_parses_its_own_answers() {
    let Some(vocabulary) = released("tokenizer") else { return };
    let tokenizer = Tokenizer::open(&vocabulary).unwrap();
    let format = ChatFormat::new(&tokenizer).unwrap();
    let answer = "<|close|>think<|sep|><|open|>response<|sep|>🚀 é<|close|>response<|sep|><|open|>tools<|sep|>\
                  <|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"k\" type=\"number\"<|sep|>4\
                  <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>\
                  <|end_of_msg|>";
    let mut ids = tokenizer.encode("Hm, ").unwrap();
    ids.extend(tokenizer.encode_with_specials(answer).unwrap());
    let (mut stream, mut events) = (format.stream(true), Vec::new());
    for id in ids {
        stream.push(id, &mut events).unwrap();
    }
    stream.finish(&mut events);
    let seen = Seen::of(&events);
    assert_eq!((seen.thinking.as_str(), seen.response.as_str(), seen.ends), ("Hm, ", "🚀 é", 1));
    assert_eq!(seen.calls[0].arguments[0].value(), json!(4));
    assert!(seen.calls[0].complete);
}

#[test]
fn text_that_spells_markup_stays_text() {
    let request =
        ChatRequest::new(vec![Message::user("<|close|>message<|sep|>"), Message::system("<|open|>")]);
    let segments = segments(&request).unwrap();
    for text in ["<|close|>message<|sep|>", "<|open|>"] {
        assert!(segments.iter().any(|s| s.text == text && !s.control));
    }
}

#[test]
fn a_vocabulary_without_control_tokens_is_refused() {
    let tokenizer = small(&[]);
    let error = ChatFormat::new(&tokenizer).unwrap_err().to_string();
    assert!(error.contains("no <|open|> token"), "{error}");
}

fn request(value: Value) -> Result<ChatRequest, serde_json::Error> {
    serde_json::from_value(value)
}

#[test]
fn what_the_format_cannot_say_is_refused() {
    let refused = |value: Value, message: &str| {
        let error = request(value).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    let messages = json!([{"role": "user", "content": "x"}]);
    refused(json!({"messages": messages, "thinking_effort": "medium"}), "unknown variant `medium`");
    refused(json!({"messages": messages, "tool_choice": "none"}), "unknown variant `none`");
    refused(json!({"messages": messages, "temperature": 1}), "unknown field `temperature`");
    refused(json!({"messages": [{"role": "robot", "content": "x"}]}), "unknown variant `robot`");
    refused(json!({"messages": [{"role": "user", "content": ["x"]}]}), "expected a string");
    refused(json!({"messages": messages, "response_format": {"type": "xml"}}), "unknown variant `xml`");
    assert!("medium".parse::<ThinkingEffort>().is_err());
    assert_eq!("max".parse(), Ok(ThinkingEffort::Max));
}

#[test]
fn a_request_that_contradicts_itself_is_refused() {
    let refused = |value: Value, message: &str| {
        let error = segments(&request(value).unwrap()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    let call = |id: &str, arguments: Value| json!({"role": "assistant", "tool_calls": [{"id": id, "function": {"name": "f", "arguments": arguments}}]});
    let result = json!({"role": "tool", "tool_call_id": "a", "content": "x"});
    refused(
        json!({"messages": [call("b", json!({})), result]}),
        "messages[1]: tool_call_id \"a\" is not a call",
    );
    refused(json!({"messages": [call("a", json!({})), result, result]}), "messages[2]: a second result");
    refused(
        json!({"messages": [call("a", json!("[1]"))]}),
        "messages[0]: the arguments of the call of \"f\"",
    );
    refused(json!({"messages": [{"role": "tool", "content": "x"}]}), "needs tool_call_id or tool");
    refused(
        json!({"messages": [call("a", json!({})), {"role": "tool", "tool_call_id": "a", "tool": "g", "content": ""}]}),
        "from \"g\", but call \"a\" is of \"f\"",
    );
    refused(json!({"messages": [], "tool_choice": "required"}), "no tools are declared");
    refused(json!({"messages": [], "image_prompts": ["<|media_pad|>"]}), "1 image prompts for 0");
}

/// What events amount to, however finely they were cut.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    thinking: String,
    response: String,
    started: Vec<(usize, String)>,
    calls: Vec<CalledTool>,
    ends: usize,
}

impl Seen {
    fn of(events: &[ChatEvent]) -> Self {
        let mut seen = Self::default();
        for event in events {
            match event {
                ChatEvent::Thinking(text) => seen.thinking.push_str(text),
                ChatEvent::Response(text) => seen.response.push_str(text),
                ChatEvent::ToolCallStart { index, name } => seen.started.push((*index, name.clone())),
                ChatEvent::ToolCall(call) => seen.calls.push(call.clone()),
                ChatEvent::End => seen.ends += 1,
            }
        }
        seen
    }

    fn all_text(&self) -> String {
        let mut text = self.thinking.clone() + &self.response;
        for call in &self.calls {
            text.push_str(&call.name);
            for argument in &call.arguments {
                text += &(argument.key.clone() + &argument.kind + &argument.text);
            }
        }
        text
    }
}

fn parse(pieces: &[Piece<'_>]) -> Seen {
    let (mut parser, mut events) = (ChatParser::new(Channel::Thinking), Vec::new());
    for piece in pieces {
        parser.push(*piece, &mut events);
    }
    parser.finish(&mut events);
    Seen::of(&events)
}

#[test]
fn broken_answers_lose_no_text() {
    use Piece::{Close, EndOfMessage, Open, Sep, Text};
    let seen = parse(&[Text("a"), Open, Text("poem"), Sep, Text("b"), Open, Text("cut")]);
    assert_eq!((seen.thinking.as_str(), seen.ends), ("apoembcut", 0));
    let seen = parse(&[
        Text("a"),
        Open,
        Text("response"),
        Sep,
        Text("b"),
        Close,
        Close,
        Text("c"),
        Sep,
        EndOfMessage,
    ]);
    assert_eq!((seen.thinking.as_str(), seen.response.as_str(), seen.ends), ("a", "bc", 1));
    let call = [
        Open,
        Text("call tool=\"f&quot;&amp;amp;\""),
        Sep,
        Open,
        Text("argument key=\"k\" type=\"object\""),
        Sep,
    ];
    let seen = parse(&[&call[..], &[Text("{\"a\": "), EndOfMessage]].concat());
    let CalledTool { index, name, arguments, complete } = &seen.calls[0];
    assert_eq!((*index, name.as_str(), *complete), (1, "f\"&amp;", false));
    assert_eq!(arguments[0].value(), json!("{\"a\": "));
    // Closed properly: complete, and the value is JSON.
    let seen = parse(
        &[&call[..], &[Text("{\"a\": 1}"), Close, Text("argument"), Sep, Close, Text("call"), Sep]].concat(),
    );
    assert!(seen.calls[0].complete);
    assert_eq!(seen.calls[0].arguments[0].value(), json!({"a": 1}));
    // The end of the call without the end of its argument: not to be trusted.
    let seen = parse(&[&call[..], &[Text("1"), Close, Text("call"), Sep]].concat());
    assert!(!seen.calls[0].complete);
    let long = "x".repeat(20_000);
    assert_eq!(parse(&[Open, Text(&long), Text("y")]).thinking, long + "y");
}

#[derive(Clone, Debug)]
enum Part {
    Marker(Piece<'static>),
    Tag(&'static str),
    Text(usize),
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    use Piece::{Close, EndOfMessage, Open, Sep};
    let tags = [
        "think",
        "response",
        "tools",
        "message",
        "message role=\"assistant\"",
        "call tool=\"f\" index=\"2\"",
        "call tool=\"f\"",
        "call index=\"1\"",
        "call",
        "argument",
        "argument key=\"k\" type=\"string\"",
        "argument key=\"k\" type=\"number\"",
        "call tool=\"f\" index=\"z\"",
        "poem",
        "think x=\"1\"",
        " think",
    ];
    let part = prop_oneof![
        3 => prop::sample::select(vec![Open, Open, Close, Sep, Sep, EndOfMessage]).prop_map(Part::Marker),
        2 => prop::sample::select(tags.to_vec()).prop_map(Part::Tag),
        2 => (1_usize..6).prop_map(Part::Text),
    ];
    prop::collection::vec(part, 0..40)
}

proptest! {
    /// Every character of its own kind is found again, once; no cut of the text changes anything.
    #[test]
    fn no_character_is_lost_and_no_split_matters(parts in parts(), cuts in prop::collection::vec(1_usize..5, 1..6)) {
        let mut own = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{fffff}');
        let texts: Vec<Option<String>> = parts.iter().map(|part| match part {
            Part::Marker(_) => None,
            Part::Tag(tag) => Some((*tag).to_owned()),
            Part::Text(n) => Some(own.by_ref().take(*n).collect()),
        }).collect();
        let mut pieces = Vec::new();
        for (part, text) in parts.iter().zip(&texts) {
            match (part, text) {
                (Part::Marker(marker), _) => pieces.push(*marker),
                (_, Some(text)) => pieces.push(Piece::Text(text)),
                _ => {}
            }
        }
        let whole = parse(&pieces);
        let is_own = |c: &char| *c >= '\u{e000}';
        let mut found: Vec<char> = whole.all_text().chars().filter(is_own).collect();
        found.sort_unstable();
        let mut given: Vec<char> = texts.iter().flatten().flat_map(|t| t.chars()).filter(is_own).collect();
        given.sort_unstable();
        prop_assert_eq!(found, given);

        let mut cuts = cuts.into_iter().cycle();
        let mut fine = Vec::new();
        for piece in &pieces {
            let Piece::Text(mut rest) = *piece else {
                fine.push(*piece);
                continue;
            };
            while !rest.is_empty() {
                let n = cuts.next().unwrap_or(1);
                let at = rest.char_indices().nth(n).map_or(rest.len(), |(at, _)| at);
                fine.push(Piece::Text(&rest[..at]));
                rest = &rest[at..];
            }
        }
        prop_assert_eq!(parse(&fine), whole);
    }

    /// What the encoder writes for an earlier answer, the parser reads back.
    #[test]
    fn an_encoded_answer_parses_back(
        thinking in ".*", response in ".*", key in ".*", text in ".*", number in any::<f64>(), name in ".+",
    ) {
        let arguments = json!({ key.clone(): text, "n": {"deep": [number, null]} });
        let message = json!({"role": "assistant", "content": response, "reasoning_content": thinking,
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}]});
        let mut asked = request(json!({"messages": [message]})).unwrap();
        asked.add_generation_prompt = false;
        let segments = segments(&asked).unwrap();
        let pieces: Vec<Piece<'_>> = segments.iter().map(|segment| match (&*segment.text, segment.control) {
            (OPEN, true) => Piece::Open,
            (CLOSE, true) => Piece::Close,
            (SEP, true) => Piece::Sep,
            (END_OF_MESSAGE, true) => Piece::EndOfMessage,
            (text, _) => Piece::Text(text),
        }).collect();
        let seen = parse(&pieces);
        prop_assert_eq!((&seen.thinking, &seen.response, seen.ends), (&thinking, &response, 1));
        let call = &seen.calls[0];
        prop_assert!(call.complete);
        prop_assert_eq!(&call.name, &name);
        let values: serde_json::Map<String, Value> =
            call.arguments.iter().map(|a| (a.key.clone(), a.value())).collect();
        prop_assert_eq!(Value::Object(values), arguments);
    }
}
