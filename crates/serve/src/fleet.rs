//! The vaults that can be served, and which of them are loaded.
//!
//! ```text
//! acquire(id) ── loaded? ──► lease
//!      │ no: wait for the turn (one swap at a time, in the order of arrival)
//!      └─► swap: the least recently used leaves when its jobs are done ──► open, load ──► lease
//! ```
//!
//! A swap that has begun goes on when its client leaves: half a model is of no use to the next one.

mod door;
mod scan;

use std::cell::RefCell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smoe_engine::{EngineError, EngineInfo, Meters, Vault};
use smoe_text::ModelText;
use tokio::sync::watch;

use crate::error::ApiError;
use crate::model::{Lease, Model};
use crate::runner::Machine;
use crate::turn::Phase;

pub use door::Place;
pub use scan::Listing;

use door::Doors;
use scan::Catalogue;

/// The name by which a client asks for whatever model there is.
pub const ANY_MODEL: &str = "s-moe";

/// Opens a vault's head.
pub type Open = Box<dyn Fn(&Path) -> Result<Vault, String> + Send + Sync>;

/// Loads a vault.
pub type Start = Box<dyn Fn(Starting<'_>) -> Result<Opened, EngineError> + Send + Sync>;

/// What is to be loaded, and beside what.
pub struct Starting<'a> {
    /// The vault.
    pub vault: &'a Vault,
    /// Bytes that models which stay loaded may hold.
    pub held: u64,
    /// To be told of bytes loaded, of how many.
    pub progress: &'a mut dyn FnMut(u64, u64),
}

impl fmt::Debug for Starting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Starting").field("held", &self.held).finish_non_exhaustive()
    }
}

/// A model that was loaded.
pub struct Opened {
    /// What computes.
    pub machine: Box<dyn Machine>,
    /// Its counters.
    pub meters: Option<Meters>,
    /// Its plan.
    pub info: Option<EngineInfo>,
    /// What it goes without, in words.
    pub warnings: Vec<String>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Where vaults are, and how they are loaded.
pub struct LoaderConfig {
    /// Each a vault, an original `.smoe` file, or a directory of them.
    pub paths: Vec<PathBuf>,
    /// Opens a vault's head; no weights.
    pub open: Open,
    /// Loads it.
    pub start: Start,
    /// How many models may be loaded at once, if memory allows; at least 1.
    pub resident: usize,
    /// How many answers may wait for a model, besides those that it computes at once.
    pub max_waiting: usize,
}

impl fmt::Debug for LoaderConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderConfig")
            .field("paths", &self.paths)
            .field("resident", &self.resident)
            .finish_non_exhaustive()
    }
}

/// A model that is being loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loading {
    /// Its id.
    pub id: String,
    /// Bytes loaded.
    pub done: u64,
    /// Of so many; 0 while that is not known.
    pub total: u64,
}

/// The vaults and the loaded models.
#[derive(Debug)]
pub struct Fleet {
    config: LoaderConfig,
    catalogue: Mutex<Catalogue>,
    /// The most recently used last.
    loaded: Mutex<Vec<Arc<Model>>>,
    loading: watch::Sender<Option<Loading>>,
    swap: Arc<tokio::sync::Mutex<()>>,
    doors: Arc<Doors>,
}

impl Fleet {
    /// Looks for the vaults; none is loaded.
    ///
    /// # Errors
    /// If there is none, or none that can be opened: why.
    pub fn new(config: LoaderConfig) -> Result<Arc<Self>, String> {
        let mut catalogue = Catalogue::default();
        catalogue.scan(&config.paths, &config.open);
        if catalogue.listings().is_empty() {
            return Err(catalogue.complaint());
        }
        Ok(Arc::new(Self {
            config,
            catalogue: Mutex::new(catalogue),
            loaded: Mutex::default(),
            loading: watch::Sender::new(None),
            swap: Arc::default(),
            doors: Arc::default(),
        }))
    }

    /// Every vault that can be opened, after a look at the disk, and the model where it is loaded.
    pub async fn models(self: &Arc<Self>) -> Vec<(Listing, Option<Arc<Model>>)> {
        let fleet = self.clone();
        let scanned = tokio::task::spawn_blocking(move || fleet.rescan()).await;
        let loaded = self.loaded();
        let model = |id: &str| loaded.iter().find(|model| model.listing().id == id).cloned();
        let listings = scanned.unwrap_or_default().into_iter();
        listings.map(|listing| (listing.clone(), model(&listing.id))).collect()
    }

    fn rescan(&self) -> Vec<Listing> {
        let mut catalogue = lock(&self.catalogue);
        catalogue.scan(&self.config.paths, &self.config.open);
        catalogue.listings()
    }

    /// The models that are loaded, the most recently used last.
    pub fn loaded(&self) -> Vec<Arc<Model>> {
        lock(&self.loaded).clone()
    }

    /// The model that is being loaded now; who subscribes hears of its progress.
    pub fn loading(&self) -> watch::Receiver<Option<Loading>> {
        self.loading.subscribe()
    }

    /// The vault that a name means: [`ANY_MODEL`] and nothing at all are the model used last, or the one that is
    /// being loaded, or the first.
    ///
    /// # Errors
    /// If there is no such vault.
    pub async fn resolve(self: &Arc<Self>, name: &str) -> Result<Listing, ApiError> {
        if name.is_empty() || name == ANY_MODEL {
            if let Some(model) = lock(&self.loaded).last() {
                return Ok(model.listing().clone());
            }
            let loading = self.loading.borrow().as_ref().map(|loading| loading.id.clone());
            let catalogue = lock(&self.catalogue);
            let found = loading.and_then(|id| catalogue.find(&id)).or_else(|| catalogue.first());
            return found.ok_or_else(|| ApiError::no_model(ANY_MODEL));
        }
        if let Some(listing) = lock(&self.catalogue).find(name) {
            return Ok(listing);
        }
        // It may be new.
        let listings = self.models().await;
        let found = listings.into_iter().find(|(listing, _)| listing.id == name);
        found.map(|(listing, _)| listing).ok_or_else(|| ApiError::no_model(name))
    }

    /// How many answers may wait for a model.
    pub(crate) fn max_waiting(&self) -> usize {
        self.config.max_waiting
    }

    /// Takes places for `n` jobs of this model, all or none, and says whether it is sure that it can have so many jobs.
    /// It is not where the model is not loaded yet and nobody else wants it: somebody has to, so that it is.
    ///
    /// # Errors
    /// If others have the places, or the model never has so many.
    pub(crate) fn enter(&self, id: &str, n: usize) -> Result<(Vec<Place>, bool), ApiError> {
        let model = lock(&self.loaded).iter().find(|model| model.listing().id == id).cloned();
        if let Some(model) = &model {
            self.fits(model, n)?;
        }
        // Any model has one job at once at the least.
        let most = model.as_ref().map_or(self.config.max_waiting.max(1), |model| self.places(model));
        match self.doors.enter(id, n, most) {
            Ok(places) => Ok((places, true)),
            Err(0) if model.is_none() => Ok((self.doors.enter(id, n, n).map_err(ApiError::busy)?, false)),
            Err(taken) => Err(ApiError::busy(taken)),
        }
    }

    /// Whether a loaded model ever has places for `n` jobs.
    ///
    /// # Errors
    /// If not.
    pub(crate) fn fits(&self, model: &Model, n: usize) -> Result<(), ApiError> {
        let places = self.places(model);
        if n <= places {
            return Ok(());
        }
        let message = format!("n is {n}; this model answers {places} at once as it is served here");
        Err(ApiError::field("n", message))
    }

    fn places(&self, model: &Model) -> usize {
        model.runner().load().max_running + self.config.max_waiting
    }

    /// The model of this id, loaded if need be; `phase` hears of it.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub async fn acquire(
        self: &Arc<Self>,
        id: &str,
        phase: &(dyn Fn(Phase) + Sync),
    ) -> Result<Lease, ApiError> {
        if let Some(lease) = self.lease(id) {
            return Ok(lease);
        }
        let mut loading = self.loading.subscribe();
        let told = |loading: &watch::Receiver<Option<Loading>>| match &*loading.borrow() {
            Some(loading) if loading.id == id => {
                phase(Phase::Loading { done: loading.done, total: loading.total });
            }
            _ => {}
        };
        phase(Phase::Loading { done: 0, total: 0 });
        let turn = self.swap.clone().lock_owned();
        let turn = hearing(turn, &mut loading, &told).await;
        if let Some(lease) = self.lease(id) {
            return Ok(lease);
        }
        let (fleet, wanted) = (self.clone(), id.to_owned());
        let swapped = tokio::spawn(async move {
            let swapped = fleet.swap_in(&wanted).await;
            drop(turn);
            swapped
        });
        let swapped = hearing(swapped, &mut loading, &told).await;
        swapped.unwrap_or_else(|_| Err(ApiError::not_loaded(id, "loading it failed unexpectedly")))
    }

    /// A lease of the model, if it is loaded and alive.
    fn lease(&self, id: &str) -> Option<Lease> {
        let mut loaded = lock(&self.loaded);
        let at = loaded.iter().position(|model| model.listing().id == id && !model.runner().is_over())?;
        let model = loaded.remove(at);
        let lease = Lease::new(&model);
        loaded.push(model);
        Some(lease)
    }

    /// Loads a model, after others have left. One at a time.
    async fn swap_in(self: &Arc<Self>, id: &str) -> Result<Lease, ApiError> {
        let found = lock(&self.catalogue).find(id);
        let listing = found.ok_or_else(|| ApiError::no_model(id))?;
        self.loading.send_replace(Some(Loading { id: id.to_owned(), done: 0, total: 0 }));
        let dead: Vec<_> = lock(&self.loaded).extract_if(.., |model| model.runner().is_over()).collect();
        for model in dead {
            stop(model).await;
        }
        let result = loop {
            while lock(&self.loaded).len() >= self.config.resident.max(1) {
                self.unload_one().await;
            }
            let (fleet, wanted) = (self.clone(), listing.clone());
            let loaded = tokio::task::spawn_blocking(move || fleet.load(wanted)).await;
            match loaded.unwrap_or_else(|_| Err(LoadError::Other("the loader panicked".to_owned()))) {
                Ok(model) => {
                    let model = Arc::new(model);
                    let lease = Lease::new(&model);
                    lock(&self.loaded).push(model);
                    break Ok(lease);
                }
                // There is room when the others have gone.
                Err(LoadError::Engine(EngineError::Budget { .. })) if !lock(&self.loaded).is_empty() => {
                    self.unload_one().await;
                }
                Err(error) => break Err(ApiError::not_loaded(id, &error.to_string())),
            }
        };
        self.loading.send_replace(None);
        match &result {
            Ok(_) => tracing::info!(model = id, "loaded"),
            Err(error) => tracing::warn!(model = id, "{}", error.message),
        }
        result
    }

    /// Unloads the model that was used least recently, one that is idle if there is one, when its jobs are done.
    async fn unload_one(&self) {
        let model = {
            let mut loaded = lock(&self.loaded);
            let idle = loaded.iter().position(|model| model.users() == 0);
            if loaded.is_empty() {
                return;
            }
            loaded.remove(idle.unwrap_or(0))
        };
        model.idle().await;
        stop(model).await;
    }

    /// Ends all models, their jobs first if they are not done.
    pub(crate) async fn shut_down(&self) {
        let models = std::mem::take(&mut *lock(&self.loaded));
        // At once: each has its own conversations to bring to its own file.
        futures_util::future::join_all(models.into_iter().map(stop)).await;
    }

    fn load(&self, listing: Listing) -> Result<Model, LoadError> {
        let vault = (self.config.open)(&listing.path).map_err(LoadError::Other)?;
        let text = open_text(&vault)?;
        let held = lock(&self.loaded).iter().map(|model| model.held_bytes()).sum();
        let progress = &mut |done, total| {
            self.loading.send_replace(Some(Loading { id: listing.id.clone(), done, total }));
        };
        let opened = (self.config.start)(Starting { vault: &vault, held, progress })?;
        for warning in &opened.warnings {
            tracing::warn!(model = listing.id, "{warning}");
        }
        Model::new(listing, text, vault.spec.vocab_size, opened)
            .map_err(|error| LoadError::Other(error.to_string()))
    }
}

async fn stop(model: Arc<Model>) {
    let id = model.listing().id.clone();
    // A panic in there is logged where it happens.
    let _ = tokio::task::spawn_blocking(move || model.runner().stop()).await;
    tracing::info!(model = id, "unloaded");
}

/// Waits for `work`, hearing of every change of what is being loaded.
async fn hearing<F: Future>(
    work: F,
    loading: &mut watch::Receiver<Option<Loading>>,
    told: &(dyn Fn(&watch::Receiver<Option<Loading>>) + Sync),
) -> F::Output {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            biased;
            output = &mut work => return output,
            // The sender lives as long as the fleet.
            _ = loading.changed() => told(loading),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What panics while one is held is a vault's reader; the data is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Text(#[from] smoe_text::TextError),
    #[error("{0}")]
    Other(String),
}

/// The text side of a vault.
fn open_text(vault: &Vault) -> Result<ModelText, LoadError> {
    let failed = RefCell::new(None);
    let read = |name: &str| {
        vault.side_file(name).unwrap_or_else(|error| {
            failed.borrow_mut().get_or_insert(error);
            None
        })
    };
    let text = ModelText::load(&read);
    if let Some(error) = failed.take() {
        return Err(error.into());
    }
    Ok(text?)
}
