//! What a line asks for.

use std::path::PathBuf;

use k3_pipeline::chat::ThinkingEffort;

use super::screen::Thinking;

/// A line, understood.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Command {
    /// Not a command: said to the model.
    Say(String),
    Help,
    /// New instructions; empty: none.
    System(String),
    Save(PathBuf),
    Load(PathBuf),
    Reset,
    /// Takes back the last thing said.
    Undo,
    /// Says the last thing again.
    Again,
    /// Says this in place of the last thing.
    Edit(String),
    Stats,
    Set(Setting),
    Exit,
}

/// A changed setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Setting {
    Temperature(f32),
    TopK(usize),
    TopP(f32),
    MinP(f32),
    Seed(u64),
    MaxTokens(usize),
    Thinking(Thinking),
    Effort(Option<ThinkingEffort>),
}

/// The commands.
pub(super) const HELP: &str = "\
/help                 this list
/system TEXT          new instructions (none without TEXT); the conversation is read again
/save FILE            save the conversation; /load FILE goes on with it without reading it again
/again                another answer to what you said last
/edit TEXT            say TEXT in place of what you said last
/undo                 take back what you said last, and its answer
/reset                forget the conversation
/stats                time, bytes, memory so far
/set temperature X    also: top-k, top-p, min-p, seed, max-tokens
/set thinking HOW     on, hidden or off
/set effort HOW       low, high, max or default; the conversation is read again
/exit                 or Ctrl-D
A line that begins with // is said with one /.";

/// Understands a line; `None` where it is empty.
pub(super) fn parse(line: &str) -> Result<Option<Command>, String> {
    let Some(command) = line.strip_prefix('/') else {
        return Ok(Some(line)
            .filter(|line| !line.trim().is_empty())
            .map(|line| Command::Say(line.to_owned())));
    };
    if command.starts_with('/') {
        return Ok(Some(Command::Say(command.to_owned())));
    }
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    let file = |what: fn(PathBuf) -> Command| match rest {
        "" => Err(format!("/{name} needs a file")),
        path => Ok(what(PathBuf::from(path))),
    };
    let alone = |what| match rest {
        "" => Ok(what),
        _ => Err(format!("/{name} takes nothing after it, found {rest:?}")),
    };
    Ok(Some(match name {
        "help" => alone(Command::Help)?,
        "system" => Command::System(rest.to_owned()),
        "save" => file(Command::Save)?,
        "load" => file(Command::Load)?,
        "reset" => alone(Command::Reset)?,
        "undo" => alone(Command::Undo)?,
        "again" => alone(Command::Again)?,
        "edit" if rest.is_empty() => return Err("/edit needs a text".to_owned()),
        "edit" => Command::Edit(rest.to_owned()),
        "stats" => alone(Command::Stats)?,
        "exit" | "quit" => alone(Command::Exit)?,
        "set" => Command::Set(setting(rest)?),
        _ => return Err(format!("/{name} is no command; /help lists them")),
    }))
}

fn setting(text: &str) -> Result<Setting, String> {
    let (key, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let value = value.trim();
    fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
        value.parse().map_err(|_| format!("{key}: {value:?} is not a number that it can be"))
    }
    Ok(match key.replace('_', "-").as_str() {
        "temperature" => Setting::Temperature(number(key, value)?),
        "top-k" => Setting::TopK(number(key, value)?),
        "top-p" => Setting::TopP(number(key, value)?),
        "min-p" => Setting::MinP(number(key, value)?),
        "seed" => Setting::Seed(number(key, value)?),
        "max-tokens" => match number(key, value)? {
            0 => return Err("max-tokens: at least 1".to_owned()),
            n => Setting::MaxTokens(n),
        },
        "thinking" => Setting::Thinking(match value {
            "on" => Thinking::Shown,
            "hidden" => Thinking::Hidden,
            "off" => Thinking::Off,
            _ => return Err(format!("thinking: expected on, hidden or off, found {value:?}")),
        }),
        "effort" if value == "default" => Setting::Effort(None),
        "effort" => Setting::Effort(Some(value.parse()?)),
        _ => return Err(format!("{key:?} cannot be set; /help lists what can")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let parsed = |line: &str| parse(line).unwrap();
        assert_eq!(parsed("  "), None);
        assert_eq!(parsed(" hi "), Some(Command::Say(" hi ".into())));
        assert_eq!(parsed("//x"), Some(Command::Say("/x".into())));
        assert_eq!(parsed("/system Be brief. "), Some(Command::System("Be brief.".into())));
        assert_eq!(parsed("/save a b"), Some(Command::Save("a b".into())));
        assert_eq!(parsed("/set top_p 0.5"), Some(Command::Set(Setting::TopP(0.5))));
        assert_eq!(parsed("/set effort max"), Some(Command::Set(Setting::Effort(Some(ThinkingEffort::Max)))));
        assert_eq!(parsed("/set thinking hidden"), Some(Command::Set(Setting::Thinking(Thinking::Hidden))));
        assert_eq!(parsed("/undo"), Some(Command::Undo));
        assert_eq!(parsed("/again"), Some(Command::Again));
        assert_eq!(parsed("/edit a /b"), Some(Command::Edit("a /b".into())));
        assert_eq!(parsed("/quit"), Some(Command::Exit));
    }

    #[test]
    fn what_is_not_understood_is_said() {
        for (line, message) in [
            ("/sing", "/sing is no command"),
            ("/save", "/save needs a file"),
            ("/edit", "/edit needs a text"),
            ("/again and again", "takes nothing after it"),
            ("/reset now", "takes nothing after it"),
            ("/set", "cannot be set"),
            ("/set seed -1", "seed: \"-1\" is not a number"),
            ("/set max-tokens 0", "at least 1"),
            ("/set effort medium", "expected low, high or max"),
            ("/set thinking maybe", "expected on, hidden or off"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
