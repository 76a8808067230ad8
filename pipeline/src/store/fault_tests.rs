//! Every way a disk fails must end in an error that names it, within seconds, and leave nothing running.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::faulty::{Fault, FaultKind, FaultyReader};
use super::reader::{BlockReader, PreadReader};
use super::testing::{Fixture, LAYERS, plan};
use super::throttled::ThrottledReader;
use super::{Store, StoreError, StoreOptions};
use crate::model::tensors::Extent;
use crate::plan::{DirectMode, IoEngine, Plan};
use crate::source::{ExpertSource, WeightSource};

const ALL: usize = usize::MAX;
const DEADLINE: Duration = Duration::from_secs(5);

/// Runs `work` and fails when it takes longer than [`DEADLINE`].
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = channel();
    let thread = std::thread::spawn(move || done.send(work()));
    match result.recv_timeout(DEADLINE) {
        Ok(value) => value,
        Err(_) if thread.is_finished() => std::panic::resume_unwind(thread.join().unwrap_err()),
        Err(_) => panic!("hangs"),
    }
}

fn options(faults: Vec<Fault>) -> StoreOptions {
    StoreOptions { reader: Some(Arc::new(FaultyReader::new(Arc::new(PreadReader), faults))), trace: None }
}

fn fault(f: &Fixture, e: &Extent, kind: FaultKind) -> Fault {
    let path = f.path(usize::from(e.file.0)).to_owned();
    Fault { path, range: e.offset..e.offset + e.bytes, kind, skip: 0 }
}

/// One pass with everything in it.
fn pass(f: &Fixture, s: &mut Store) -> Result<(), StoreError> {
    f.walk(s, true, ALL)?;
    for layer in 1..LAYERS {
        f.ask(s, layer, &[1, 5, 9, 3])?;
    }
    f.embed(s, &[4, 5, 6])
}

fn plans() -> Vec<Plan> {
    let mut wide = plan();
    wide.trunk.ring_slots = 4;
    wide.experts.staging_slots = 3;
    wide.experts.arena_slots = vec![0, 2, 2, 2];
    vec![plan(), wide]
}

fn assert_named(error: &StoreError, path: &Path) {
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()), "{text}");
    assert!(text.contains("offset") || matches!(error, StoreError::FileChanged { .. }), "{text}");
}

#[test]
fn an_error_or_an_early_end_is_named_wherever_it_strikes() {
    for kind in [FaultKind::Error(libc::EIO), FaultKind::EndOfFile, FaultKind::Panic] {
        for plan in plans() {
            for place in 0..4 {
                let kind = kind.clone();
                let plan = plan.clone();
                let (error, path) = in_time(move || {
                    let f = Fixture::new(true);
                    let layer = &f.tensors.layers[2];
                    let extent = match place {
                        0 => layer.matrices[0].extent,
                        1 => f.tensors.head.extent,
                        2 => layer.experts.as_ref().unwrap().extents(crate::units::ExpertId(5)).unwrap().0[2],
                        _ => Extent {
                            bytes: 192,
                            offset: f.tensors.embed.extent.offset + 5 * 192,
                            ..f.tensors.embed.extent
                        },
                    };
                    // Vectors are read at open: the fault strikes after that.
                    let mut fault = fault(&f, &extent, kind);
                    fault.range.end = fault.range.start + 1;
                    fault.skip = 0;
                    let path = fault.path.clone();
                    let error = match f.open_with(&plan, &options(vec![fault])) {
                        Err(error) => error,
                        Ok(mut s) => pass(&f, &mut s).unwrap_err(),
                    };
                    (error, path)
                });
                assert_named(&error, &path);
            }
        }
    }
}

#[test]
fn short_and_late_reads_change_nothing() {
    for plan in plans() {
        for direct in [DirectMode::Auto, DirectMode::Off] {
            for kind in [FaultKind::Short(5000), FaultKind::Delay(Duration::from_millis(2))] {
                let mut plan = plan.clone();
                plan.reader.direct = direct;
                in_time(move || {
                    let f = Fixture::new(false);
                    let late = f.tensors.layers[1].matrices[0].extent;
                    let everywhere = |file| Extent {
                        file: crate::model::tensors::FileId(file),
                        offset: 0,
                        bytes: 1 << 40,
                    };
                    let faults = match kind {
                        FaultKind::Delay(_) => vec![fault(&f, &late, kind)],
                        _ => (0..3).map(|n| fault(&f, &everywhere(n), kind.clone())).collect(),
                    };
                    let mut s = f.open_with(&plan, &options(faults)).unwrap();
                    pass(&f, &mut s).unwrap();
                    pass(&f, &mut s).unwrap();
                });
            }
        }
    }
}

#[test]
fn reads_that_make_no_headway_end() {
    in_time(|| {
        let f = Fixture::new(true);
        let e = f.tensors.layers[0].matrices[0].extent;
        let mut plan = plan();
        plan.reader.direct = DirectMode::On;
        let kind = FaultKind::Short(100);
        match f.open_with(&plan, &options(vec![fault(&f, &e, kind)])) {
            Err(StoreError::DirectUnavailable { .. }) => {}
            Err(e) => assert!(matches!(e, StoreError::ShortRead { .. }), "{e}"),
            Ok(mut s) => assert!(matches!(pass(&f, &mut s), Err(StoreError::ShortRead { .. }))),
        }
    });
}

#[test]
fn a_flipped_bit_reaches_the_reader_of_the_block() {
    let f = Fixture::new(true);
    let e = f.tensors.layers[1].matrices[0].extent;
    let mut s = f.open_with(&plan(), &options(vec![fault(&f, &e, FaultKind::FlipBit(3))])).unwrap();
    let walked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f.walk(&mut s, true, ALL)));
    assert!(walked.is_err(), "the comparison with the file did not see the flipped bit");
}

#[test]
fn after_a_failed_pass_the_next_one_is_whole() {
    for plan in plans() {
        in_time(move || {
            let f = Fixture::new(true);
            let block = f.tensors.layers[2].matrices[1].extent;
            let expert = f.tensors.layers[1].experts.as_ref().unwrap();
            let expert = expert.extents(crate::units::ExpertId(5)).unwrap().0[0];
            // Each strikes once and is over: a disk that has a bad moment.
            let faults = vec![
                once(fault(&f, &block, FaultKind::Error(libc::EIO))),
                once(fault(&f, &expert, FaultKind::Error(libc::EIO))),
            ];
            let reader = Arc::new(OnceFaulty { inner: PreadReader, faults });
            let mut s = f.open_with(&plan, &StoreOptions { reader: Some(reader), trace: None }).unwrap();
            assert!(matches!(f.walk(&mut s, true, ALL), Err(StoreError::Read { .. })));
            assert!(matches!(s.trunk.next_block(), Err(StoreError::PassEnded { .. })));
            f.walk(&mut s, true, ALL).unwrap();
            assert!(matches!(f.ask(&mut s, 1, &[5, 1, 2]), Err(StoreError::Read { .. })));
            s.experts.abandon().unwrap();
            for _ in 0..3 {
                pass(&f, &mut s).unwrap();
            }
        });
    }
}

/// Fails the first read that touches the range.
fn once(fault: Fault) -> (Fault, std::sync::atomic::AtomicBool) {
    (fault, std::sync::atomic::AtomicBool::new(false))
}

struct OnceFaulty {
    inner: PreadReader,
    faults: Vec<(Fault, std::sync::atomic::AtomicBool)>,
}

impl BlockReader for OnceFaulty {
    fn read_at(
        &self,
        file: &super::files::SourceFile,
        offset: u64,
        buf: &mut [u8],
    ) -> std::io::Result<usize> {
        let end = offset + buf.len() as u64;
        for (fault, struck) in &self.faults {
            let touches = file.path() == fault.path && offset < fault.range.end && end > fault.range.start;
            if touches && !struck.swap(true, std::sync::atomic::Ordering::Relaxed) {
                return Err(std::io::Error::from_raw_os_error(libc::EIO));
            }
        }
        self.inner.read_at(file, offset, buf)
    }
}

/// Both engines: with io_uring where this machine has it.
fn engines() -> Vec<Plan> {
    [IoEngine::Pread, IoEngine::Auto]
        .into_iter()
        .flat_map(|engine| {
            plans().into_iter().map(move |mut p| {
                p.reader.engine = engine;
                p
            })
        })
        .collect()
}

#[test]
fn both_engines_give_the_same_bytes_and_say_which_they_are() {
    for plan in engines() {
        in_time(move || {
            let f = Fixture::new(false);
            let mut s = f.open(&plan).unwrap();
            let report = s.disks.reports().next().unwrap().clone();
            match plan.reader.engine {
                IoEngine::Pread => assert_eq!((report.engine, report.fallback), ("pread", None)),
                _ => assert_eq!(report.engine == "io_uring", report.fallback.is_none()),
            }
            for head in [true, false, true] {
                f.walk(&mut s, head, 7).unwrap();
                f.walk(&mut s, head, ALL).unwrap();
                pass(&f, &mut s).unwrap();
            }
        });
    }
}

#[test]
fn a_file_truncated_overwritten_or_replaced_while_in_use_ends_the_pass() {
    for plan in engines() {
        for change in 0..3 {
            let plan = plan.clone();
            let (error, path) = in_time(move || {
                let f = Fixture::new(true);
                let mut s = f.open(&plan).unwrap();
                pass(&f, &mut s).unwrap();
                let path = f.path(1).to_owned();
                match change {
                    0 => std::fs::File::options().write(true).open(&path).unwrap().set_len(5000).unwrap(),
                    1 => {
                        std::thread::sleep(Duration::from_millis(20));
                        let file = std::fs::File::options().write(true).open(&path).unwrap();
                        file.write_all_at(b"other bytes", 8000).unwrap();
                    }
                    _ => {
                        let other = f.dir.path().join("other");
                        std::fs::copy(&path, &other).unwrap();
                        std::fs::rename(&other, &path).unwrap();
                    }
                }
                (pass(&f, &mut s).unwrap_err(), path)
            });
            assert!(matches!(error, StoreError::FileChanged { .. }), "change {change}: {error}");
            assert_named(&error, &path);
        }
    }
}

#[test]
fn a_file_overwritten_in_the_middle_of_a_pass_ends_it() {
    for plan in engines() {
        in_time(move || {
            let f = Fixture::new(true);
            let mut s = f.open(&plan).unwrap();
            s.trunk.begin_pass(true).unwrap();
            s.trunk.next_block().unwrap();
            std::thread::sleep(Duration::from_millis(20));
            let file = std::fs::File::options().write(true).open(f.path(1)).unwrap();
            file.write_all_at(b"other bytes", 8000).unwrap();
            let error = loop {
                match s.trunk.next_block() {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, StoreError::FileChanged { what: "modification time", .. }), "{error}");
        });
    }
}

#[test]
fn files_that_are_not_what_their_header_was_read_from_are_refused_at_open() {
    in_time(|| {
        let f = Fixture::new(true);
        std::fs::File::options().write(true).open(f.path(0)).unwrap().set_len(100).unwrap();
        assert!(matches!(f.open(&plan()), Err(StoreError::FileChanged { what: "length", got: 100, .. })));
        std::fs::remove_file(f.path(0)).unwrap();
        assert!(matches!(f.open(&plan()), Err(StoreError::Open { .. })));
        std::fs::create_dir(f.path(0)).unwrap();
        assert!(matches!(f.open(&plan()), Err(StoreError::NotARegularFile { .. })));
        std::fs::remove_dir(f.path(0)).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, f.path(0), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(matches!(f.open(&plan()), Err(StoreError::NotARegularFile { .. })));
    });
}

#[test]
fn a_vector_that_is_not_finite_is_named() {
    let f = Fixture::new(true);
    let v = &f.tensors.layers[1].vectors[0];
    let file = std::fs::File::options().write(true).open(f.path(usize::from(v.extent.file.0))).unwrap();
    file.write_all_at(&0x7fc0u16.to_le_bytes(), v.extent.offset + 14).unwrap();
    match f.open(&plan()) {
        Err(StoreError::NonFinite { tensor, index: 7, value }) => {
            assert!(value.is_nan() && tensor.ends_with("layers.1.input_layernorm.weight"), "{tensor}");
        }
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn threads_are_joined_and_no_file_stays_open() {
    for plan in engines() {
        in_time(move || {
            let f = Fixture::new(true);
            let mut s = f.open(&plan).unwrap();
            f.walk(&mut s, true, 3).unwrap();
            let disks = Arc::downgrade(&s.disks);
            drop(s);
            assert!(disks.upgrade().is_none());
            let open = std::fs::read_dir("/proc/self/fd").unwrap().filter(|fd| {
                let target = std::fs::read_link(fd.as_ref().unwrap().path());
                target.is_ok_and(|t| t.starts_with(f.dir.path()))
            });
            assert_eq!(open.count(), 0);
        });
    }
}

#[test]
fn a_throttled_reader_takes_as_long_as_its_bandwidth_says_on_any_number_of_threads() {
    in_time(|| {
        let f = Fixture::new(true);
        let reader = ThrottledReader::new(Arc::new(PreadReader), 4e6, Duration::ZERO);
        let options = StoreOptions { reader: Some(Arc::new(reader)), trace: None };
        let mut s = f.open_with(&plans()[1], &options).unwrap();
        f.walk(&mut s, true, ALL).unwrap();
        let (start, before) = (Instant::now(), s.counters.snapshot().trunk_bytes);
        for _ in 0..3 {
            f.walk(&mut s, true, ALL).unwrap();
        }
        let bytes = s.counters.snapshot().trunk_bytes - before;
        let least = bytes as f64 / 4e6;
        let took = start.elapsed().as_secs_f64();
        // A ring of 4 blocks may have been read ahead.
        assert!(took > 0.8 * least, "{bytes} bytes took {took} s, {least} at least");
    });
}

#[test]
fn an_engine_or_mode_demanded_and_not_to_be_had_is_refused() {
    let f = Fixture::new(true);
    let mut p = plan();
    p.reader.engine = IoEngine::Uring;
    let error = f.open_with(&p, &options(Vec::new())).err().unwrap();
    assert!(matches!(error, StoreError::EngineUnavailable { engine: "io_uring", .. }), "{error}");
}
