//! Generation and conversations through the library.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;

use k3_kernel::Kernels;
use k3_pipeline::conversation::{Answer, AnswerOptions, ChatOptions, Conversation, Ended, Heard, Speaker};
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::generation::{Chosen, Generator};
use k3_pipeline::model::tensors::Fingerprint;
use k3_pipeline::preset::Preset;
use k3_pipeline::sample::{Sampler, SamplingError, SamplingParams, StopMatcher};
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::speculate::{Drafter, Gated, LookupParams, PromptLookup};
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::TokenId;
use k3_tests::corrupt::Model;
use k3_tests::harness::preset_engine;
use serde_json::json;

const VOCABULARY: usize = 320;
/// Everything in memory and one thread: streaming and teams are tested elsewhere.
pub(crate) const RESIDENT: [&str; 4] =
    ["trunk.pinned=all", "trunk.head=pinned", "experts.cache=64 MiB", "compute.threads=1"];
const MODEL: Fingerprint = Fingerprint(3);

/// k3-tiny-b with a vocabulary: 256 bytes, 48 pairs, special tokens where its configuration has them;
/// those of chat only if asked for.
pub(crate) fn model(chat: bool) -> Model {
    let model = Model::copy_of("k3-tiny-b");
    let mut ranks = String::new();
    for byte in 0..=255_u8 {
        writeln!(ranks, "{} {byte}", base64(&[byte])).unwrap();
    }
    for i in 0..48_u8 {
        writeln!(ranks, "{} {}", base64(&[b'a' + i % 24, b'a' + i / 24]), 256 + u32::from(i)).unwrap();
    }
    std::fs::write(model.file("tiktoken.model"), ranks).unwrap();
    let names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"];
    let mut tokens = json!({"319": {"content": "[PAD]"}});
    for (i, name) in names.iter().take(if chat { 6 } else { 3 }).enumerate() {
        tokens[(304 + i).to_string()] = json!({"content": name, "special": true});
    }
    let config = json!({"added_tokens_decoder": tokens, "bos_token": "[BOS]"});
    std::fs::write(model.file("tokenizer_config.json"), config.to_string()).unwrap();
    model
}

/// Of one or two bytes.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |n: u32| char::from(DIGITS[(n & 63) as usize]);
    let (a, b) = (u32::from(bytes[0]), u32::from(*bytes.get(1).unwrap_or(&0)));
    let n = a << 16 | b << 8;
    let third = if bytes.len() == 2 { digit(n >> 6) } else { '=' };
    [digit(n >> 18), digit(n >> 12), third, '='].iter().collect()
}

fn engine(dir: &Path) -> Engine {
    let resident = RESIDENT.map(str::to_owned);
    preset_engine(&Preset::load("demo", &resident).unwrap(), dir)
}

fn generator(params: SamplingParams, drafter: Option<Box<dyn Drafter>>) -> Generator {
    let sampler = Sampler::new(params, VOCABULARY, Kernels::detect()).unwrap();
    Generator::new(sampler, drafter, true)
}

fn warm() -> SamplingParams {
    SamplingParams { temperature: 0.9, seed: 5, presence_penalty: 0.3, ..SamplingParams::default() }
}

#[derive(Debug)]
enum Failure {
    Run,
    Sampling,
}

impl From<RunError> for Failure {
    fn from(_: RunError) -> Self {
        Self::Run
    }
}

impl From<SamplingError> for Failure {
    fn from(_: SamplingError) -> Self {
        Self::Sampling
    }
}

/// Generates `count` tokens after `prompt`; gives them and the passes of decoding.
fn generate(
    engine: &mut Engine,
    generator: &mut Generator,
    prompt: &[TokenId],
    count: usize,
) -> (Vec<TokenId>, u64) {
    let mut session = Session::new(engine);
    generator.sampler_mut().begin(prompt).unwrap();
    let before = engine.stats().decode.passes;
    let logits = session.prefill(engine, prompt, Prefill::default()).unwrap();
    let mut ids = vec![generator.first(logits.last().unwrap()).unwrap().id];
    let mut flow = ControlFlow::Continue(ids[0]);
    while let ControlFlow::Continue(last) = flow {
        let mut emit = |chosen: Chosen<'_>| {
            ids.push(chosen.id);
            Ok::<_, Failure>(if ids.len() < count {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            })
        };
        flow = generator.step(engine, &mut session, last, &mut emit).unwrap();
    }
    // What was committed is what was fed: everything but the last token.
    let expected = [prompt, &ids[..ids.len() - 1]].concat();
    assert_eq!(session.tokens(), expected);
    (ids, engine.stats().decode.passes - before)
}

/// Always guesses what a list says, or always something else.
struct Oracle {
    text: Vec<TokenId>,
    is_right: bool,
}

impl Drafter for Oracle {
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>) {
        let guesses = self.text.iter().skip(tokens.len()).take(max);
        let wrong = u32::from(!self.is_right);
        out.extend(guesses.map(|id| TokenId((id.0 + wrong) % VOCABULARY as u32)));
    }

    fn accepted(&mut self, _: usize, _: usize) {}
}

#[test]
fn drafts_change_the_passes_and_not_the_text() {
    let model = model(true);
    let mut engine = engine(model.path());
    let prompt: Vec<TokenId> = [1, 2, 3, 1, 2, 3, 1, 2].map(TokenId).to_vec();
    for params in [SamplingParams::default(), warm()] {
        let (plain, passes) = generate(&mut engine, &mut generator(params.clone(), None), &prompt, 24);
        assert_eq!(passes, 23);
        let oracle = |is_right| Box::new(Oracle { text: [&prompt[..], &plain].concat(), is_right });
        let right = generate(&mut engine, &mut generator(params.clone(), Some(oracle(true))), &prompt, 24);
        // The demo preset drafts 4 tokens: the decided one and three guesses.
        assert_eq!((right.0, right.1), (plain.clone(), 6));
        let wrong = generate(&mut engine, &mut generator(params.clone(), Some(oracle(false))), &prompt, 24);
        assert_eq!((wrong.0, wrong.1), (plain.clone(), 23));
        let lookup: Box<dyn Drafter> = Box::new(Gated::new(PromptLookup::new(LookupParams::default())));
        let looked = generate(&mut engine, &mut generator(params, Some(lookup)), &prompt, 24);
        assert_eq!(looked.0, plain);
        assert!(looked.1 <= 23);
    }
}

fn say(
    (conversation, engine): (&mut Conversation<'_>, &mut Engine),
    generator: &mut Generator,
    what: &str,
    hear: &mut dyn FnMut(Heard<'_>),
) -> Answer {
    let options = AnswerOptions {
        max_tokens: 16,
        stop: StopMatcher::new(vec![TokenId(306)], Vec::new()).unwrap(),
        watch: None,
        hear,
    };
    conversation.say(Speaker { engine, generator }, what, options).unwrap()
}

fn options() -> ChatOptions {
    ChatOptions { system: Some("Be brief.".into()), thinking: true, effort: None }
}

fn shown(answer: &Answer) -> (String, String, Ended, usize) {
    (answer.thinking.clone(), answer.response.clone(), answer.ended, answer.tokens)
}

#[test]
fn a_saved_conversation_goes_on_as_if_uninterrupted() {
    for chat in [true, false] {
        let model = model(chat);
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let mut engine = engine(model.path());
        let path = model.file("talk.k3s");
        let mut quiet = |_: Heard<'_>| ();
        let mut first = generator(warm(), None);
        let mut talk = Conversation::new(&tokenizer, Session::new(&engine), options());
        assert_eq!(talk.is_chat(), chat);
        say((&mut talk, &mut engine), &mut first, "hello", &mut quiet);
        talk.save(&path, (MODEL, "tiny"), &first).unwrap();
        let read_so_far = talk.len();
        let expected = say((&mut talk, &mut engine), &mut first, "more", &mut quiet);
        assert!(expected.prompt_tokens < read_so_far, "nothing is read twice");

        let mut second = generator(SamplingParams { seed: 99, ..warm() }, None);
        let mut resumed = Conversation::new(&tokenizer, Session::new(&engine), ChatOptions::default());
        resumed.load(&path, MODEL, &mut second).unwrap();
        assert_eq!(resumed.options(), &options());
        assert_eq!(resumed.messages().len(), 2);
        let found = say((&mut resumed, &mut engine), &mut second, "more", &mut quiet);
        assert_eq!(shown(&found), shown(&expected));
        assert_eq!(resumed.len(), talk.len());
        let error = resumed.load(&path, Fingerprint(4), &mut second).unwrap_err().to_string();
        assert!(error.contains("is of model \"tiny\""), "{error}");
        assert_eq!(resumed.len(), talk.len());
    }
}

#[test]
fn an_interrupted_answer_is_closed_and_the_conversation_goes_on() {
    let model = model(true);
    let tokenizer = Tokenizer::open(model.path()).unwrap();
    let mut engine = engine(model.path());
    let mut generator = generator(warm(), None);
    let mut talk = Conversation::new(&tokenizer, Session::new(&engine), options());
    let cancel = engine.cancel_flag();
    let mut heard = 0;
    let mut hear = |_: Heard<'_>| {
        heard += 1;
        cancel.store(heard == 3, Ordering::SeqCst);
    };
    let answer = say((&mut talk, &mut engine), &mut generator, "hello", &mut hear);
    assert_eq!(answer.ended, Ended::Interrupted);
    assert!(answer.tokens < 16);
    cancel.store(false, Ordering::SeqCst);
    let before = talk.len();
    let next = say((&mut talk, &mut engine), &mut generator, "again", &mut |_| ());
    assert!(next.prompt_tokens < before, "the session was not lost");
    // New instructions: everything is read again, once.
    talk.set_options(ChatOptions { system: Some("Be long.".into()), ..options() }).unwrap();
    let reread = say((&mut talk, &mut engine), &mut generator, "third", &mut |_| ());
    assert!(reread.prompt_tokens > next.prompt_tokens + 16);
}

#[test]
fn what_was_said_can_be_taken_back_and_only_what_differs_is_read_again() {
    let model = model(true);
    let tokenizer = Tokenizer::open(model.path()).unwrap();
    let mut engine = engine(model.path());
    let quiet = &mut |_: Heard<'_>| ();
    let greedy = || generator(SamplingParams::default(), None);
    let fresh = |engine: &mut Engine, said: &[&str]| {
        let mut talk = Conversation::new(&tokenizer, Session::new(engine), options());
        let answers: Vec<Answer> =
            said.iter().map(|what| say((&mut talk, engine), &mut greedy(), what, &mut |_| ())).collect();
        (answers, talk.len())
    };
    let mut talk = Conversation::new(&tokenizer, Session::new(&engine), options());
    assert_eq!(talk.take_back(), None);
    let mut first = greedy();
    for what in ["one", "two", "three"] {
        say((&mut talk, &mut engine), &mut first, what, quiet);
    }
    // The last thing again, then with other words, then the one before with other words.
    let (expected, length) = fresh(&mut engine, &["one", "two", "three"]);
    assert_eq!(talk.take_back(), Some("three".into()));
    let again = say((&mut talk, &mut engine), &mut greedy(), "three", quiet);
    assert_eq!((shown(&again), talk.len()), (shown(&expected[2]), length));
    assert!(again.prompt_tokens < expected[0].prompt_tokens, "only the last turn is read: {again:?}");
    talk.take_back();
    talk.take_back();
    assert_eq!(talk.messages().len(), 2);
    let (expected, length) = fresh(&mut engine, &["one", "other"]);
    let other = say((&mut talk, &mut engine), &mut greedy(), "other", quiet);
    assert_eq!((shown(&other), talk.len()), (shown(&expected[1]), length));
    assert!(other.prompt_tokens < expected[0].prompt_tokens);
    // Everything taken back: the instructions are still there.
    while talk.take_back().is_some() {}
    let (expected, _) = fresh(&mut engine, &["new"]);
    let new = say((&mut talk, &mut engine), &mut greedy(), "new", quiet);
    assert_eq!(shown(&new), shown(&expected[0]));
    assert!(
        new.prompt_tokens < expected[0].prompt_tokens,
        "{} {}",
        new.prompt_tokens,
        expected[0].prompt_tokens
    );
}
