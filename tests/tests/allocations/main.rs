//! Nothing is allocated per token, by no thread: counted by the allocator itself. A binary of its own,
//! since the count is the whole process's.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::units::TokenId;
use k3_tests::harness::{argmax, demo_engine};

struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn no_token_allocates() {
    for engine in ["pread", "auto"] {
        for overrides in [&["compute.threads=1"][..], &["compute.threads=3", "trunk.ring_slots=1"]] {
            let mut overrides = overrides.to_vec();
            let reader = format!("reader.engine={engine}");
            overrides.push(&reader);
            let mut engine = demo_engine(&overrides);
            let mut session = Session::new(&engine);
            let text: Vec<TokenId> = (1..40).map(TokenId).collect();
            let logits = session.prefill(&mut engine, &text, Prefill::default()).unwrap();
            let mut next = TokenId(argmax(logits.last().unwrap()) as u32);
            // Queues and mailboxes reach their sizes.
            for _ in 0..4 {
                let logits = session.decode(&mut engine, next).unwrap();
                next = TokenId(argmax(logits.last().unwrap()) as u32);
            }

            let before = CALLS.load(Ordering::SeqCst);
            for _ in 0..16 {
                let logits = session.decode(&mut engine, next).unwrap();
                next = TokenId(argmax(logits.last().unwrap()) as u32);
            }
            session.draft(&mut engine, &[next, TokenId(3), TokenId(4)]).unwrap();
            session.commit(&mut engine, 2).unwrap();
            let calls = CALLS.load(Ordering::SeqCst) - before;
            assert_eq!(calls, 0, "allocations in 17 passes with {overrides:?}");
        }
    }
}
