//! The shape that a name or a config.json stands for.

use std::fs;
use std::path::Path;

use serde_json::Value;
use smoe_format::ModelSpec;
use smoe_format::spec::{FfnKind, MixerKind};

use super::published::PUBLISHED;
use crate::config::spec_from_config;
use crate::error::{SculptError, Warning};
use crate::source::Packing;

/// A model's shape.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its name, or `config.json`.
    pub name: String,
    /// What a synthetic vault of it holds.
    pub spec: ModelSpec,
    /// Its experts are published in MXFP4.
    pub mxfp4: bool,
    /// What was odd about its config.json.
    pub warnings: Vec<Warning>,
}

/// The family name of a synthetic vault: nothing takes it for the model whose shape it has.
const MODEL_TYPE: &str = "synthetic";

impl Shape {
    /// The names that [`Shape::find`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        PUBLISHED.iter().map(|(name, _)| *name)
    }

    /// The shape called `like`: a name, a config.json, or a directory with one.
    ///
    /// # Errors
    /// If it is neither, or a config.json of a family that is not known.
    pub fn find(like: &str) -> Result<Self, SculptError> {
        if let Some((name, config)) = PUBLISHED.iter().find(|(name, _)| *name == like) {
            return Self::of_config(name, config());
        }
        let path = Path::new(like);
        if !path.exists() {
            let names = Self::names().collect::<Vec<_>>().join(", ");
            let expected = format!("neither a file nor one of {names}");
            return Err(SculptError::Setting { flag: "--like", found: like.to_owned(), expected });
        }
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let bytes = fs::read(&path).map_err(SculptError::io("read", &path))?;
        let config = serde_json::from_slice(&bytes).map_err(SculptError::json(&path))?;
        Self::of_config("config.json", config)
    }

    fn of_config(name: &str, mut config: Value) -> Result<Self, SculptError> {
        // However weights are packed, they are random here: a packing that is not known does not matter.
        let mxfp4 = matches!(Packing::take(&mut config), Ok(Packing::Mxfp4));
        let (mut spec, warnings) = spec_from_config(&config)?;
        MODEL_TYPE.clone_into(&mut spec.model_type);
        Ok(Self { name: name.to_owned(), spec, mxfp4, warnings })
    }

    /// Cuts it to its first `layers` layers.
    ///
    /// # Errors
    /// If there are not so many, or none with experts among them.
    pub fn cut(&mut self, layers: usize) -> Result<(), SculptError> {
        let n = self.spec.n_layers();
        let bad =
            |expected| Err(SculptError::Setting { flag: "--layers", found: layers.to_string(), expected });
        if !(1..=n).contains(&layers) {
            return bad(format!("{} has 1 to {n}", self.name));
        }
        if !self.spec.layers[..layers].contains(&FfnKind::Moe) {
            return bad("leaves no layer with experts".to_owned());
        }
        self.spec.layers.truncate(layers);
        self.spec.windows.truncate(layers);
        self.spec.mixers.truncate(layers);
        if !self.spec.mixers.contains(&MixerKind::GatedDelta) {
            (self.spec.mixers, self.spec.delta) = (Vec::new(), None);
        } else if !self.spec.mixers.contains(&MixerKind::Attention) {
            return bad("leaves no layer with attention".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_name_is_a_model_that_the_engine_can_run() {
        for name in Shape::names() {
            let shape = Shape::find(name).expect(name);
            shape.spec.validate().expect(name);
            assert_eq!((shape.name.as_str(), shape.warnings.as_slice()), (name, &[][..]));
            assert_eq!(shape.mxfp4, name.starts_with("gpt-oss"), "{name}");
        }
    }

    #[test]
    fn a_config_as_published_is_read_whatever_its_weights_are_packed_in() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        let (_, config) = PUBLISHED.iter().find(|(name, _)| *name == "deepseek-v3").expect("known");
        for (method, mxfp4) in [("fp8", false), ("compressed-tensors", false), ("mxfp4", true)] {
            let mut config = config();
            config["quantization_config"] = serde_json::json!({ "quant_method": method });
            fs::write(&path, config.to_string()).expect("written");
            let shape = Shape::find(path.to_str().expect("text")).expect(method);
            assert_eq!(shape.spec, Shape::find("deepseek-v3").expect("known").spec);
            assert_eq!(shape.mxfp4, mxfp4, "{method}");
        }
    }
}
