//! Fork, join, panics, and the cutting of work.

use super::*;

#[test]
fn every_thread_runs_every_job_once() {
    for threads in 1..=5 {
        let mut team = Team::new(threads, false).unwrap();
        for _ in 0..200 {
            let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            team.run(&|i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn a_team_that_has_parked_wakes_up() {
    let mut team = Team::new(3, true).unwrap();
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let calls = AtomicUsize::new(0);
        team.run(&|i| {
            std::thread::sleep(std::time::Duration::from_millis(5 * i as u64));
            calls.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(calls.into_inner(), 3);
    }
}

#[test]
fn a_panic_in_any_thread_ends_the_job_and_leaves_the_team_usable() {
    let mut team = Team::new(3, false).unwrap();
    for bad in 0..3 {
        let failed = team.run(&|i| assert_ne!(i, bad, "on purpose"));
        assert!(matches!(failed, Err(TeamError::Panicked)));
        team.run(&|_| ()).unwrap();
    }
}

/// A team whose only worker is a thread that never looks for work.
fn team_with_an_absent_worker() -> (Team, std::sync::mpsc::Sender<()>) {
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let mut team = Team::new(1, false).unwrap();
    // It ends when the sender is dropped.
    team.workers.push(std::thread::spawn(move || assert!(wait.recv().is_err())));
    (team, end)
}

#[test]
fn shared_work_does_not_wait_for_a_thread_that_does_not_come() {
    let (mut team, end) = team_with_an_absent_worker();
    for _ in 0..3 {
        let done: Vec<AtomicUsize> = (0..7).map(|_| AtomicUsize::new(0)).collect();
        team.items(7, &|worker, item| {
            assert_eq!(worker, 0);
            done[item].fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }
    drop(end);
}

#[test]
fn a_thread_that_comes_late_takes_part_in_the_next_job_only() {
    let (mut team, end) = team_with_an_absent_worker();
    team.items(4, &|_, _| ()).unwrap();
    // The worker wakes up for the first job, which is over.
    assert_eq!(team.shared.enter(0), None);
    let late = std::sync::Barrier::new(2);
    let (shared, caller) = (Arc::clone(&team.shared), std::thread::current());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            late.wait();
            assert_eq!(shared.enter(0), Some(2));
            assert_eq!(shared.enter(2), None, "a second time");
            late.wait();
            // The caller is done, and waits all the same.
            std::thread::sleep(std::time::Duration::from_millis(20));
            shared.panicked.store(true, Ordering::SeqCst);
            shared.gate.fetch_sub(1, Ordering::SeqCst);
            caller.unpark();
        });
        let first = AtomicBool::new(true);
        let waited = team.items(2, &|_, _| {
            if first.swap(false, Ordering::SeqCst) {
                late.wait();
                late.wait();
            }
        });
        assert!(matches!(waited, Err(TeamError::Panicked)));
    });
    drop(end);
}

#[test]
fn tiles_cover_the_array_once_and_stay_inside_their_columns() {
    let mut team = Team::new(4, false).unwrap();
    let mut scratch = PerWorker::new(4, || 0usize);
    let mut data = vec![0f32; 7 * 10];
    team.parts(&mut scratch, Tiles::new(&mut data, 10, 1..9, 3, 3), |_, i, mut tile| {
        for row in tile.rows() {
            for v in tile.row(row) {
                *v += (i + 1) as f32;
            }
        }
    })
    .unwrap();
    for (i, v) in data.iter().enumerate() {
        let (row, col) = (i / 10, i % 10);
        let want = if (1..9).contains(&col) { (row / 3 * 3 + (col - 1) / 3 + 1) as f32 } else { 0.0 };
        assert_eq!(*v, want, "row {row} column {col}");
    }
}

#[test]
fn rows_are_cut_at_granules_and_covered_once() {
    for threads in 1..=4 {
        let mut team = Team::new(threads, false).unwrap();
        let (rows, count) = (16 * 9 + 5, 3);
        let mut data = vec![0f32; rows * count];
        let mut scratch = PerWorker::new(threads, || ());
        team.rows(&mut scratch, [Out::new(&mut data, rows, rows, count)], |(), range, [mut part]| {
            assert_eq!(range.start % ROW_GRANULE, 0);
            for t in 0..part.count() {
                for (v, row) in part.column(t).iter_mut().zip(range.clone()) {
                    *v += (t * 1000 + row) as f32;
                }
            }
        })
        .unwrap();
        for (i, v) in data.iter().enumerate() {
            assert_eq!(*v, (i / rows * 1000 + i % rows) as f32);
        }
    }
}

#[test]
fn a_panic_in_a_lone_item_is_caught_too() {
    let mut team = Team::new(2, false).unwrap();
    assert!(matches!(team.items(1, &|_, _| panic!("on purpose")), Err(TeamError::Panicked)));
    team.items(0, &|_, _| panic!("nothing to do")).unwrap();
}

#[test]
fn a_thread_late_from_shared_work_runs_the_next_job_once() {
    let mut team = Team::new(3, false).unwrap();
    let turns = if cfg!(miri) { 20 } else { 3000 };
    for _ in 0..turns {
        team.items(2, &|_, _| ()).unwrap();
        let calls: [AtomicUsize; 3] = Default::default();
        team.run(&|i| {
            calls[i].fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{calls:?}");
    }
}
