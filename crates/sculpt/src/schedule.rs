//! In which order work is done whose files come one after another.
//!
//! Work is done as soon as the last file that it needs is here; a file goes when the last work that needs it is done.
//! With the tensors of a layer side by side, as checkpoints are cut, only those that are split between two files keep
//! the first of them until the second is here.

use std::collections::BTreeMap;

use crate::plan::{Item, Plan};

/// What is done once a file is here.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    /// The file, by number.
    pub shard: usize,
    /// The work, as numbers of items.
    pub work: Vec<usize>,
    /// Files that are not needed afterwards.
    pub last_of: Vec<usize>,
}

/// Sorts `todo`, with the files that each of them needs, into stages.
pub(crate) fn stages(todo: impl IntoIterator<Item = (usize, Vec<usize>)>) -> Vec<Stage> {
    let mut work: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    // Needed files, and the stage after which each is done with.
    let mut last: BTreeMap<usize, usize> = BTreeMap::new();
    for (item, shards) in todo {
        let Some(&stage) = shards.iter().max() else { continue };
        work.entry(stage).or_default().push(item);
        for shard in shards {
            let until = last.entry(shard).or_default();
            *until = stage.max(*until);
        }
    }
    let of =
        |stage| last.iter().filter(move |(_, until)| **until == stage).map(|(shard, _)| *shard).collect();
    let shards = last.keys().copied();
    shards
        .map(|shard| Stage { shard, work: work.remove(&shard).unwrap_or_default(), last_of: of(shard) })
        .collect()
}

/// The most bytes that are on the disk at once, if the file of the next stage comes while one is worked on.
pub(crate) fn most_bytes(stages: &[Stage], len: impl Fn(usize) -> u64) -> u64 {
    let mut held = stages.first().map_or(0, |stage| len(stage.shard));
    let mut most = held;
    for (i, stage) in stages.iter().enumerate() {
        held += stages.get(i + 1).map_or(0, |next| len(next.shard));
        most = most.max(held);
        held -= stage.last_of.iter().map(|&shard| len(shard)).sum::<u64>();
    }
    most
}

impl Plan {
    /// The work `todo` with the files that each needs. Entropy-coded records, whose places follow from the lengths of
    /// those before them, need the files of all those before them.
    pub fn needs(&self, items: &[Item], todo: &[usize]) -> Vec<(usize, Vec<usize>)> {
        let mut latest = 0;
        let needs = todo.iter().map(|&i| {
            let mut shards = self.shards(items[i]);
            if self.experts.coded && matches!(items[i], Item::Expert(_)) {
                latest = shards.iter().copied().fold(latest, usize::max);
                shards.push(latest);
            }
            (i, shards)
        });
        needs.collect()
    }

    /// The files that an item's weights are in.
    fn shards(&self, item: Item) -> Vec<usize> {
        let mut shards: Vec<usize> = match item {
            Item::Expert(i) => self.sources.experts[i].1.iter().flat_map(|s| s.form.shards()).collect(),
            Item::Run { tensor, .. } => self.backbone.tensors[tensor].source.form.shards(),
        };
        shards.sort_unstable();
        shards.dedup();
        shards
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_waits_for_its_last_file_and_a_file_for_its_last_work() {
        // Item 2 is split between files 0 and 1, item 5 between 1 and 3; nothing needs file 2.
        let todo = [(0, vec![0]), (1, vec![0]), (2, vec![0, 1]), (3, vec![1]), (4, vec![3]), (5, vec![3, 1])];
        let stage = |shard, work: &[usize], last_of: &[usize]| Stage {
            shard,
            work: work.to_vec(),
            last_of: last_of.to_vec(),
        };
        let stages = stages(todo);
        assert_eq!(stages, [stage(0, &[0, 1], &[]), stage(1, &[2, 3], &[0]), stage(3, &[4, 5], &[1, 3])]);
        // Files 0 and 1, then 1 and 3 beside 0 until item 2 is done.
        let len = |shard| [10, 20, 999, 40][shard];
        assert_eq!(most_bytes(&stages, len), 10 + 20 + 40);
        assert_eq!(most_bytes(&[], len), 0);
    }

    #[test]
    fn a_file_that_is_needed_for_later_work_only_comes_in_its_turn() {
        let stages = stages([(7, vec![2, 0])]);
        assert_eq!(stages.iter().map(|s| (s.shard, s.work.len())).collect::<Vec<_>>(), [(0, 0), (2, 1)]);
        assert_eq!((stages[0].last_of.len(), stages[1].last_of.as_slice()), (0, &[0, 2][..]));
    }
}
