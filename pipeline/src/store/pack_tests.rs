//! Packs: the same bytes as the checkpoint, whatever interrupts or damages them.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use k3_kernel::Kernels;

use super::pack::PackError;
use super::pack_partial::is_of_another_run;
use super::testing::{Fixture, plan};
use super::{PackOptions, PackSummary, StoreError, pack_trunk, verify_pack};
use crate::model::tensors::ModelTensors;
use crate::plan::Plan;
use crate::units::LayerIndex;

const ALL: usize = usize::MAX;

fn options() -> PackOptions {
    let plan = plan();
    PackOptions { block_bytes: plan.trunk.block_bytes, reader: plan.reader }
}

fn pack(f: &Fixture, out: &Path) -> Result<PackSummary, PackError> {
    pack_trunk((&f.config, &f.tensors), &options(), Kernels::scalar(), out, &mut |_, _| {})
}

fn verify(f: &Fixture, pack: &Path) -> Result<(), PackError> {
    verify_pack((&f.config, &f.tensors), &options(), pack, &mut |_, _| {})
}

fn packed(f: &Fixture) -> PathBuf {
    let out = f.dir.path().join("trunk.k3pack");
    pack(f, &out).unwrap();
    out
}

fn plan_with(pack: &Path) -> Plan {
    let mut p = plan();
    p.trunk.pack = Some(pack.to_owned());
    p
}

#[test]
fn a_pack_gives_the_bytes_of_the_checkpoint_streamed_and_pinned() {
    let f = Fixture::new(true);
    let out = f.dir.path().join("trunk.k3pack");
    let summary = pack(&f, &out).unwrap();
    assert!(summary.coded > 0 && summary.packed_bytes < summary.stored_bytes, "{summary:?}");
    verify(&f, &out).unwrap();
    for pinned in [vec![], vec![LayerIndex(1), LayerIndex(3)]] {
        let mut p = plan_with(&out);
        p.trunk.pinned_layers = pinned;
        p.trunk.ring_slots = 3;
        let mut s = f.open(&p).unwrap();
        for head in [true, false, true] {
            f.walk(&mut s, head, ALL).unwrap();
        }
    }
}

#[test]
fn a_run_that_was_cut_off_anywhere_goes_on_to_the_same_pack() {
    let f = Fixture::new(true);
    let whole = std::fs::read(packed(&f)).unwrap();
    let out = f.dir.path().join("again.k3pack");
    let (partial, journal) =
        (f.dir.path().join("again.k3pack.partial"), f.dir.path().join("again.k3pack.journal"));
    // A journal of the whole run, as it stood before the last step.
    pack(&f, &out).unwrap();
    std::fs::rename(&out, &partial).unwrap();
    let text = journal_of(&f);
    // The journal's first line is on the disk before there is anything to journal.
    let first = text.iter().position(|&b| b == b'\n').unwrap() + 1;
    for cut in (first..text.len()).step_by(37).chain([text.len()]) {
        std::fs::write(&journal, &text[..cut]).unwrap();
        std::fs::write(&partial, &whole).unwrap();
        let summary = pack(&f, &out).unwrap();
        let lines = text[..cut].iter().filter(|&&b| b == b'\n').count();
        assert_eq!(summary.resumed, lines - 1, "cut at {cut}");
        assert!(std::fs::read(&out).unwrap() == whole, "cut at {cut}");
        assert!(!journal.exists() && !partial.exists());
    }
    // Data that never reached the disk, under a journal that did.
    std::fs::write(&journal, &text).unwrap();
    std::fs::write(&partial, &whole[..whole.len() / 2]).unwrap();
    assert!(pack(&f, &out).unwrap().resumed < 45);
    assert!(std::fs::read(&out).unwrap() == whole);
}

#[test]
fn a_partial_file_that_no_run_left_is_kept() {
    let f = Fixture::new(true);
    let out = packed(&f);
    std::fs::remove_file(&out).unwrap();
    let (partial, journal) =
        (f.dir.path().join("trunk.k3pack.partial"), f.dir.path().join("trunk.k3pack.journal"));
    let kept = |named: &Path| match pack(&f, &out) {
        Err(PackError::WouldReplace { path, .. }) => assert_eq!(path, named),
        other => panic!("{other:?}"),
    };
    std::fs::write(&partial, "mine").unwrap();
    kept(&partial);
    assert!(!journal.exists());
    std::fs::write(&journal, "").unwrap();
    kept(&partial);
    assert_eq!(std::fs::read(&partial).unwrap(), b"mine");
    std::fs::remove_file(&partial).unwrap();
    for other in ["my diary\n", "{\"fingerprint\""] {
        std::fs::write(&journal, other).unwrap();
        kept(&journal);
        assert!(!partial.exists() && std::fs::read_to_string(&journal).unwrap() == other);
    }
    std::fs::remove_file(&journal).unwrap();
    for named in [&partial, &journal] {
        assert!(std::process::Command::new("mkfifo").arg(named).status().unwrap().success());
        kept(named);
        std::fs::remove_file(named).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", named).unwrap();
        kept(named);
        std::fs::remove_file(named).unwrap();
    }
    // What a run leaves that was killed before its first line.
    std::fs::write(&journal, "").unwrap();
    std::fs::write(&partial, "").unwrap();
    assert_eq!(pack(&f, &out).unwrap().resumed, 0);
    assert!(out.exists() && !partial.exists() && !journal.exists());
}

#[test]
fn a_file_that_is_no_pack_is_not_overwritten() {
    let f = Fixture::new(true);
    let out = f.dir.path().join("config.json");
    for held in [&b"{\"a\": 1}"[..], b"K3SESSN\n\x02", b"K3", b""] {
        std::fs::write(&out, held).unwrap();
        assert!(matches!(pack(&f, &out), Err(PackError::WouldReplace { .. })));
        assert_eq!(std::fs::read(&out).unwrap(), held);
    }
    assert!(matches!(pack(&f, f.dir.path()), Err(PackError::WouldReplace { .. })));
    let out = packed(&f);
    pack(&f, &out).unwrap();
}

#[test]
fn the_pack_of_another_checkpoint_block_size_or_version_is_kept_and_a_damaged_one_is_not() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let whole = std::fs::read(&out).unwrap();
    let kept = |tensors: &ModelTensors, options: &PackOptions, as_what: &str| {
        let before = std::fs::read(&out).unwrap();
        let packed = pack_trunk((&f.config, tensors), options, Kernels::scalar(), &out, &mut |_, _| {});
        match packed {
            Err(PackError::WouldReplace { path, what }) => assert_eq!((&path, what), (&out, as_what)),
            other => panic!("{other:?}"),
        }
        assert!(std::fs::read(&out).unwrap() == before, "{as_what}");
    };
    let mut other = (*f.tensors).clone();
    other.fingerprint.0 += 1;
    kept(&other, &options(), "the pack of another checkpoint");
    let mut small = options();
    small.block_bytes /= 2;
    kept(&f.tensors, &small, "a pack with another block size");
    let damage = |at: usize| {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        std::fs::write(&out, damaged).unwrap();
    };
    damage(7);
    kept(&f.tensors, &options(), "a pack of another version");
    for at in [9, whole.len() - 5] {
        damage(at);
        pack(&f, &out).unwrap();
        assert!(std::fs::read(&out).unwrap() == whole, "byte {at}");
    }
}

#[test]
fn a_link_stays_a_link_and_what_it_leads_to_is_packed_again() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let whole = std::fs::read(&out).unwrap();
    let link = f.dir.path().join("link.k3pack");
    std::os::unix::fs::symlink(&out, &link).unwrap();
    std::fs::write(&out, &whole[..whole.len() - 1]).unwrap();
    pack(&f, &link).unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::read(&out).unwrap() == whole);
    std::fs::remove_file(&out).unwrap();
    let dangling = pack(&f, &link);
    assert!(matches!(dangling, Err(PackError::WouldReplace { what: "a link that leads nowhere", .. })));
    assert!(link.is_symlink() && !out.exists());
}

#[test]
fn two_runs_do_not_write_one_pack() {
    let f = Fixture::new(true);
    let out = f.dir.path().join("trunk.k3pack");
    let (partial, journal) =
        (f.dir.path().join("trunk.k3pack.partial"), f.dir.path().join("trunk.k3pack.journal"));
    let other_run = std::fs::File::create(&journal).unwrap();
    other_run.lock().unwrap();
    assert!(matches!(pack(&f, &out), Err(PackError::Busy { path }) if path == out));
    assert!(!out.exists() && !partial.exists() && std::fs::read(&journal).unwrap().is_empty());
    drop(other_run);
    pack(&f, &out).unwrap();
    // Opened in the moment before the other run finished: what would be locked is no journal any more.
    let finished = std::fs::File::create(&journal).unwrap();
    assert!(!is_of_another_run(&finished).unwrap());
    std::fs::remove_file(&journal).unwrap();
    assert!(is_of_another_run(&finished).unwrap());
}

/// What the journal of a whole run holds, made from the manifest.
fn journal_of(f: &Fixture) -> Vec<u8> {
    let pack = std::fs::read(f.dir.path().join("trunk.k3pack")).unwrap();
    let at = u64::from_le_bytes(pack[8..16].try_into().unwrap()) as usize;
    let manifest: serde_json::Value = serde_json::from_slice(&pack[at..]).unwrap();
    let mut lines = vec![manifest["made_for"].to_string()];
    lines.extend(manifest["blocks"].as_array().unwrap().iter().map(ToString::to_string));
    (lines.join("\n") + "\n").into_bytes()
}

#[test]
fn a_partial_pack_of_another_checkpoint_is_begun_anew() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let text = String::from_utf8(journal_of(&f)).unwrap();
    std::fs::write(f.dir.path().join("b.k3pack.journal"), text.replacen("00000000001", "00000000002", 1))
        .unwrap();
    std::fs::copy(&out, f.dir.path().join("b.k3pack.partial")).unwrap();
    assert_eq!(pack(&f, &f.dir.path().join("b.k3pack")).unwrap().resumed, 0);
}

#[test]
fn a_flipped_bit_in_any_block_is_caught_and_named() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let whole = std::fs::read(&out).unwrap();
    let text = String::from_utf8(journal_of(&f)).unwrap();
    let file = OpenOptions::new().write(true).open(&out).unwrap();
    for (number, line) in text.lines().skip(1).enumerate() {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        let offset = entry["offset"].as_u64().unwrap();
        let at = offset + (number as u64 * 7919) % entry["bytes"].as_u64().unwrap();
        let good = whole[at as usize];
        file.write_all_at(&[good ^ (1 << (number % 8))], at).unwrap();
        let named = |e: &StoreError| matches!(e, StoreError::Checksum { block, .. } if *block == number);
        match verify(&f, &out) {
            Err(PackError::Store(e)) => assert!(named(&e), "{e}"),
            other => panic!("block {number}: {other:?}"),
        }
        let mut s = f.open(&plan_with(&out)).unwrap();
        let error = f.walk(&mut s, true, ALL).unwrap_err();
        assert!(named(&error), "block {number}: {error}");
        let mut p = plan_with(&out);
        p.trunk.pinned_layers = (0..4).map(LayerIndex).collect();
        p.trunk.pinned_head = true;
        let error = f.open(&p).err().unwrap();
        assert!(named(&error), "block {number}, pinned: {error}");
        drop(s);
        file.write_all_at(&[good], at).unwrap();
    }
    verify(&f, &out).unwrap();
}

#[test]
fn a_flipped_bit_between_the_blocks_is_named_and_changes_no_output() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let whole = std::fs::read(&out).unwrap();
    let text = String::from_utf8(journal_of(&f)).unwrap();
    let behind_blocks = text.lines().skip(1).map(|line| {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        let end = (entry["offset"].as_u64().unwrap() + entry["bytes"].as_u64().unwrap()) as usize;
        end..end.next_multiple_of(4096)
    });
    let gaps = std::iter::once(40..4096).chain(behind_blocks).filter(|gap| !gap.is_empty());
    let gaps: Vec<_> = gaps.collect();
    assert!(gaps.len() > 10, "{gaps:?}");
    let file = OpenOptions::new().write(true).open(&out).unwrap();
    for at in gaps.iter().flat_map(|gap| [gap.start, gap.end - 1]) {
        assert_eq!(whole[at], 0);
        file.write_all_at(&[1 << (at % 8)], at as u64).unwrap();
        let error = verify(&f, &out).unwrap_err();
        assert!(matches!(error, PackError::NotAPack { .. }), "{error}");
        assert!(error.to_string().contains(&format!(": byte {at} of its padding")), "{error}");
        let mut s = f.open(&plan_with(&out)).unwrap();
        f.walk(&mut s, true, ALL).unwrap();
        drop(s);
        file.write_all_at(&[0], at as u64).unwrap();
    }
    verify(&f, &out).unwrap();
}

#[test]
fn packs_that_are_foreign_cut_off_or_altered_are_refused() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let whole = std::fs::read(&out).unwrap();
    let mut other = (*f.tensors).clone();
    other.fingerprint.0 += 1;
    let foreign = verify_pack((&f.config, &other), &options(), &out, &mut |_, _| {});
    assert!(matches!(foreign, Err(PackError::Foreign { what: "checkpoint", .. })));
    let mut small = options();
    small.block_bytes /= 2;
    let foreign = verify_pack((&f.config, &f.tensors), &small, &out, &mut |_, _| {});
    assert!(matches!(foreign, Err(PackError::Foreign { what: "block size", .. })));
    for cut in [0, 7, 39, 4096, whole.len() - 1] {
        std::fs::write(&out, &whole[..cut]).unwrap();
        assert!(matches!(verify(&f, &out), Err(PackError::NotAPack { .. })), "cut at {cut}");
    }
    for at in [0, 9, 20, 33, whole.len() - 5] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&out, &bytes).unwrap();
        assert!(matches!(verify(&f, &out), Err(PackError::NotAPack { .. })), "byte {at}");
    }
    assert!(matches!(verify(&f, &f.dir.path().join("none")), Err(PackError::Open { .. })));
    assert!(matches!(verify(&f, f.dir.path()), Err(PackError::NotARegularFile { .. })));
}

/// An altered manifest with checksums that fit: the blocks themselves must give it away.
#[test]
fn a_manifest_altered_together_with_its_checksums_is_refused() {
    let f = Fixture::new(true);
    let out = packed(&f);
    let whole = std::fs::read(&out).unwrap();
    let at = u64::from_le_bytes(whole[8..16].try_into().unwrap()) as usize;
    let manifest: serde_json::Value = serde_json::from_slice(&whole[at..]).unwrap();
    let forge = |change: &dyn Fn(&mut Vec<serde_json::Value>)| {
        let mut m = manifest.clone();
        change(m["blocks"].as_array_mut().unwrap());
        let text = serde_json::to_vec(&m).unwrap();
        let mut bytes = super::pack::head(at as u64, &text);
        bytes.extend_from_slice(&whole[4096..at]);
        bytes.extend_from_slice(&text);
        std::fs::write(&out, bytes).unwrap();
        verify(&f, &out).unwrap_err()
    };
    let swapped = forge(&|b| b.swap(0, 12));
    assert!(matches!(swapped, PackError::Entry { block: 0, .. }), "{swapped}");
    let moved = forge(&|b| b[3]["offset"] = b[4]["offset"].clone());
    assert!(matches!(moved, PackError::Entry { block: 3, what: "offset", .. }), "{moved}");
    let longer = forge(&|b| b[2]["bytes"] = (b[2]["bytes"].as_u64().unwrap() + 1).into());
    assert!(matches!(longer, PackError::Entry { what: "size", .. } | PackError::Store(_)), "{longer}");
    let recoded = forge(&|b| b[0]["coding"] = "f32-rows".into());
    assert!(matches!(recoded, PackError::Entry { block: 0, what: "coding", .. }), "{recoded}");
    let fewer = forge(&|b| drop(b.pop()));
    assert!(matches!(fewer, PackError::Foreign { what: "number of blocks", .. }), "{fewer}");
    // Two blocks of one shape exchanged with their checksums: the checksum knows its block.
    let exchanged = forge(&|b| {
        let (x, y) = (b[0]["checksum"].clone(), b[1]["checksum"].clone());
        b[0]["checksum"] = y;
        b[1]["checksum"] = x;
    });
    assert!(matches!(exchanged, PackError::Store(StoreError::Checksum { .. })), "{exchanged}");
}

#[test]
fn zeros_are_holes_and_still_verified() {
    use std::os::unix::fs::MetadataExt;
    let f = Fixture::zeroed();
    let out = packed(&f);
    let meta = std::fs::metadata(&out).unwrap();
    assert!(meta.blocks() * 512 < meta.len() / 2, "{} of {}", meta.blocks() * 512, meta.len());
    verify(&f, &out).unwrap();
    let mut s = f.open(&plan_with(&out)).unwrap();
    f.walk(&mut s, true, ALL).unwrap();
}
