//! How the tokens of a part are dealt to the prompts that are being computed.
//!
//! Half of them in equal shares, so that every prompt advances in every part; the other half to those that lack least,
//! so that short prompts are soon done and equal ones follow one another instead of all being late together.
//!
//! The bound: beside n - 1 others, however long, a prompt that lacks r tokens is done after at most
//! ceil(r / max(1, floor(b / 2n))) parts of b tokens.

/// A prompt and its share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// Which one; of those that lack the same, the lower is the first.
    pub(super) job: usize,
    /// Tokens that it lacks.
    pub(super) lacks: usize,
    /// Of those, what it gets.
    pub(super) takes: usize,
}

/// Deals at most `budget` tokens, or one to each if that is more. The shares are put into another order.
pub(super) fn deal(budget: usize, shares: &mut [Share]) {
    let equal = (budget / 2).checked_div(shares.len()).unwrap_or(0).max(1);
    let mut left = budget;
    for share in &mut *shares {
        share.takes = share.lacks.min(equal);
        left = left.saturating_sub(share.takes);
    }
    shares.sort_unstable_by_key(|share| (share.lacks, share.job));
    for share in shares {
        let more = left.min(share.lacks - share.takes);
        share.takes += more;
        left -= more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(budget: usize, lacks: &[usize]) -> Vec<usize> {
        let share = |(job, &lacks)| Share { job, lacks, takes: 0 };
        let mut shares: Vec<Share> = lacks.iter().enumerate().map(share).collect();
        deal(budget, &mut shares);
        shares.sort_unstable_by_key(|share| share.job);
        shares.iter().map(|share| share.takes).collect()
    }

    #[test]
    fn everybody_advances_and_the_shortest_most() {
        assert_eq!(dealt(100, &[1000]), [100]);
        assert_eq!(dealt(100, &[1000, 1000]), [75, 25], "of equals the first");
        assert_eq!(dealt(100, &[1000, 60]), [40, 60]);
        assert_eq!(dealt(100, &[1000, 10, 20, 1000]), [58, 10, 20, 12]);
        assert_eq!(dealt(100, &[3, 4]), [3, 4]);
        assert_eq!(dealt(2, &[9, 9, 9]), [1, 1, 1], "at least one");
        assert!(dealt(7, &[]).is_empty());
    }

    /// Prompts of every size come all the time; none of those that are inside takes longer than the bound.
    #[test]
    fn nobody_waits_longer_than_the_bound() {
        let mut seed = 5_u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        for (n, budget) in [(1, 16), (2, 64), (5, 100), (8, 512), (40, 64)] {
            let mut new = || match random(4) {
                0 => 5000 + random(5000),
                1 => 1 + random(2000),
                _ => 1 + random(40),
            };
            let mut inside: Vec<(usize, usize, usize)> = (0..n).map(|_| (new() as usize, 0, 0)).collect();
            inside.iter_mut().for_each(|job| job.1 = job.0);
            for _ in 0..5000 {
                let lacks: Vec<usize> = inside.iter().map(|job| job.0).collect();
                let takes = dealt(budget, &lacks);
                assert!(takes.iter().sum::<usize>() <= budget.max(n));
                for (job, takes) in inside.iter_mut().zip(takes) {
                    job.0 -= takes;
                    job.2 += 1;
                    let bound = job.1.div_ceil((budget / (2 * n)).max(1));
                    assert!(job.2 <= bound, "{n} prompts, {budget} tokens: {job:?}");
                    if job.0 == 0 {
                        let lacks = new() as usize;
                        *job = (lacks, lacks, 0);
                    }
                }
            }
        }
    }
}
