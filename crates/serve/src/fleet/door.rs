//! How many jobs a vault has taken on: who finds no place is told so before anything else is done for them, while
//! there is still a status to tell it by.
//!
//! A place is a job's from its request until it has ended, whatever it waits for meanwhile: the model, its prompt, the
//! scheduler. So what has a place is not turned away later.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Places that are taken, by vault.
#[derive(Debug, Default)]
pub(super) struct Doors(Mutex<HashMap<String, usize>>);

/// A place.
#[derive(Debug)]
pub struct Place {
    doors: Arc<Doors>,
    vault: String,
}

impl Doors {
    /// Takes `n` places of a vault that has `most`, all or none.
    ///
    /// # Errors
    /// How many are taken.
    pub(super) fn enter(self: &Arc<Self>, vault: &str, n: usize, most: usize) -> Result<Vec<Place>, usize> {
        let mut taken = self.lock();
        let count = taken.entry(vault.to_owned()).or_default();
        if *count + n > most {
            return Err(*count);
        }
        *count += n;
        drop(taken);
        let place = || Place { doors: self.clone(), vault: vault.to_owned() };
        Ok(std::iter::repeat_with(place).take(n).collect())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(taken) = self.doors.lock().get_mut(&self.vault) {
            *taken -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_together_and_come_back_one_by_one() {
        let doors = Arc::new(Doors::default());
        let mut held = doors.enter("a", 3, 4).unwrap();
        assert_eq!(doors.enter("a", 2, 4).unwrap_err(), 3);
        assert_eq!(doors.enter("b", 4, 4).unwrap().len(), 4);
        held.pop();
        held.extend(doors.enter("a", 2, 4).unwrap());
        assert_eq!(doors.enter("a", 1, 4).unwrap_err(), 4);
        drop(held);
        assert_eq!(doors.enter("a", 1, 0).unwrap_err(), 0);
    }
}
