use super::*;

const MODEL: Fingerprint = Fingerprint(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

fn meta() -> SessionMeta {
    SessionMeta {
        fingerprint: MODEL,
        model: "demo".into(),
        prompt_tokens: 2,
        random: RandomState { seed: 7, words: 12 },
        notes: b"{}".to_vec(),
    }
}

fn text() -> Vec<TokenId> {
    vec![TokenId(1), TokenId(70_000), TokenId(3)]
}

fn state() -> Vec<Vec<f32>> {
    vec![vec![1.5, f32::from_bits(1), -0.0], Vec::new(), vec![f32::MAX; 2]]
}

fn write_small(path: &Path) {
    let (tokens, state, mark) = (text(), state(), MARK);
    let content = Content {
        tokens: &tokens,
        state: state.iter().map(Vec::as_slice).collect(),
        marks: vec![(2, vec![&mark[..1], &mark[1..]])],
    };
    write(path, &content, &meta()).unwrap();
}

const MARK: [f32; 3] = [0.25, -7.0, 1e-30];

type Read = (Vec<TokenId>, Vec<Vec<f32>>, SessionMeta);

fn read(path: &Path, model: Fingerprint) -> Result<Read, SessionFileError> {
    let mut reader = Reader::open(path, model)?;
    let tokens = reader.numbers(reader.header.tokens)?.into_iter().map(TokenId).collect();
    let marks = reader.numbers(reader.header.marks)?;
    let mut state: Vec<Vec<f32>> = state().iter().map(|slice| vec![0.0; slice.len()]).collect();
    state.iter_mut().try_for_each(|slice| reader.floats(slice))?;
    let mut mark = [0.0; 3];
    reader.fill(&mut mark)?;
    state.extend([mark.to_vec(), marks.iter().map(|position| *position as f32).collect()]);
    Ok((tokens, state, reader.finish()?))
}

fn bits(state: &[Vec<f32>]) -> Vec<Vec<u32>> {
    state.iter().map(|slice| slice.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn what_was_saved_is_resumed_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    std::fs::write(&path, "older").unwrap();
    write_small(&path);
    let (tokens, found, found_meta) = read(&path, MODEL).unwrap();
    assert_eq!(
        (tokens, bits(&found), found_meta),
        (text(), bits(&[state(), vec![MARK.to_vec(), vec![2.0]]].concat()), meta())
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn every_flipped_byte_and_every_length_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    write_small(&path);
    let good = std::fs::read(&path).unwrap();
    assert_eq!(good.len(), HEADER_BYTES + 4 * (3 + 1 + 5 + 3) + 2 + 16);
    for at in 0..good.len() {
        for flip in [1, 0x80, 0xff] {
            let mut bad = good.clone();
            bad[at] ^= flip;
            std::fs::write(&path, &bad).unwrap();
            assert!(read(&path, MODEL).is_err(), "byte {at} ^ {flip:#x}");
        }
    }
    for length in 0..good.len() {
        std::fs::write(&path, &good[..length]).unwrap();
        assert!(read(&path, MODEL).is_err(), "{length} bytes");
    }
    std::fs::write(&path, [&good[..], b"x"].concat()).unwrap();
    assert!(read(&path, MODEL).is_err());
    std::fs::write(&path, &good).unwrap();
    assert!(read(&path, MODEL).is_ok());
    println!("session file: {} bytes, each flipped in three ways: all refused", good.len());
}

#[test]
fn refusals_say_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    write_small(&path);
    let good = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], model, message: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = read(&path, model).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    let foreign = "is of model \"demo\" (0123456789abcdef0011223344556677), not of this one (";
    refused(&good, Fingerprint(5), foreign);
    refused(b"hello", MODEL, "not a session file");
    let mut bad = good.clone();
    bad[8] = 9;
    refused(&bad, MODEL, "session format 9");
    bad = good.clone();
    bad[130] = 1;
    refused(&bad, MODEL, "the checksum of its header");
    bad = good.clone();
    bad[210] ^= 1;
    refused(&bad, MODEL, "its checksum does not match");
    refused(&good[..good.len() - 1], MODEL, "was it cut off");
    let missing = read(&dir.path().join("none"), MODEL).unwrap_err();
    assert!(matches!(missing, SessionFileError::Read { .. }));
    let empty = Content { tokens: &[], state: Vec::new(), marks: Vec::new() };
    let nowhere = write(&dir.path().join("no/dir"), &empty, &meta());
    assert!(nowhere.is_err());
}

#[test]
fn long_names_keep_whole_characters() {
    assert_eq!(short_text::<4>("aéé"), [3, b'a', 0xc3, 0xa9]);
    assert_eq!(short_text::<4>("aaé"), [2, b'a', b'a', 0]);
}

#[test]
fn the_first_and_the_last_marks_stay_where_room_is_short() {
    let kept = |count, room| (0..count).filter(|at| is_kept(*at, count, room)).collect::<Vec<_>>();
    assert_eq!(kept(3, 4), [0, 1, 2]);
    assert_eq!(kept(5, 3), [0, 3, 4]);
    assert_eq!(kept(5, 2), [0, 4]);
    assert_eq!(kept(5, 1), [4]);
    assert!(kept(5, 0).is_empty());
}
