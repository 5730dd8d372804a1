//! What a caller may choose, and the one place that turns it into encodings.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use smoe_format::{BackboneTensor, Encoding, Projection, Uniform, Zero};

use crate::calibrate::Statistics;
use crate::error::SculptError;
use crate::source::evened;

/// Raised when the same settings give other bytes than before.
const CODEC: u32 = 3;
/// Columns that share a scale in the backbone.
const BACKBONE_GROUP: usize = 64;

/// The codec that a vault's settings ([`Settings::canonical`]) name, and the rest of them.
pub(crate) fn codec_of(canonical: &str) -> Option<(u32, &str)> {
    let (codec, rest) = canonical.strip_prefix("codec=")?.split_once(' ')?;
    Some((codec.parse().ok()?, rest))
}

/// What is to be said of a vault whose settings ([`Settings::canonical`]) are `line`, if its codes are those of an earlier
/// version of this program.
#[must_use]
pub fn earlier_codes(line: &str) -> Option<String> {
    let (codec, _) = codec_of(line).filter(|(codec, _)| *codec < CODEC)?;
    Some(format!(
        "its codes are those of an earlier version (codec {codec}; now {CODEC}): it can be used as it is, and sculpt \
         --force makes it anew"
    ))
}

/// How a canonical line names statistics.
pub(crate) const CALIBRATION: &str = " calibration=";

/// How it says that channels are scaled, and rows have steps, by what they are worth ([`crate::quantise::Expert`]); the
/// first vaults with statistics and entropy codes did not say so, and were not.
pub(crate) const CHANNELS: &str = " channels=scaled";

/// How a canonical line names a number of bits.
const BPW: &str = " entropy bpw=";

/// How to sculpt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bits of a code of the routed experts: 2, 3, 4, 5, 6 or 8; 16 keeps their weights as they are, whatever
    /// float type that is.
    pub bits: u8,
    /// A budget for the routed experts, codes and scales, instead of `bits`: widths then differ by tensor kind and layer.
    pub bpw: Option<BitsPerWeight>,
    /// Weights that share a scale: 32, 64 or 128. Means nothing for 16 bits.
    pub group: usize,
    /// The backbone's matrices.
    pub backbone: BackboneBits,
    /// How scales are found.
    pub recipe: Recipe,
    /// What the experts' codes of at most 4 bits stand for, where scales are searched.
    pub levels: Levels,
    /// Statistics of what the experts see ([`crate::calibrate`]), with which errors are fed back.
    pub calibration: Option<PathBuf>,
    /// Experts that the checkpoint has as codes keep them, whatever `bits` says, if the vault has an encoding
    /// for such codes. Means nothing for floats.
    pub keep_experts: bool,
    /// So do the backbone's matrices.
    pub keep_backbone: bool,
    /// Refuse what would not be kept to the bit. Needs 16 bits and an uncoded backbone.
    pub lossless: bool,
    /// Entropy-code the experts' records; needs 4-bit codes, whoever made them.
    pub entropy: bool,
    /// Hundredths of a bit that an expert's weight takes on the disk, 150 to 390, about (by a sample of the experts),
    /// scales counted, padding not: codes are then those of one step a row, as wide as that allows. Needs `entropy`;
    /// without it, codes are those
    /// of `bits` and `group`, or the checkpoint's, and take what they take.
    pub coded_bpw: Option<u16>,
    /// Where tokenizer and templates are, if not beside the weights or in them.
    pub tokenizer: Option<PathBuf>,
    /// Keep only the first layers.
    pub max_layers: Option<usize>,
    /// Keep only the first experts of each layer.
    pub max_experts: Option<usize>,
    /// Worker threads; all cores if not given. Has no influence on the bytes.
    pub threads: Option<usize>,
    /// Replace a vault, or unfinished work, of another checkpoint or other settings.
    pub force: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bits: 4,
            bpw: None,
            group: 64,
            backbone: BackboneBits::Q8,
            recipe: Recipe::Searched,
            levels: Levels::Fitted,
            calibration: None,
            keep_experts: true,
            keep_backbone: true,
            lossless: false,
            entropy: false,
            coded_bpw: None,
            tokenizer: None,
            max_layers: None,
            max_experts: None,
            threads: None,
            force: false,
        }
    }
}

/// Bits per weight, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BitsPerWeight(u32);

impl BitsPerWeight {
    /// In hundredths, rounded.
    #[must_use]
    pub fn hundredths(self) -> u16 {
        u16::try_from((self.0 + 5) / 10).unwrap_or(u16::MAX)
    }

    /// Bytes that so many weights may have.
    pub(crate) fn bytes(self, weights: u64) -> u64 {
        (u128::from(weights) * u128::from(self.0) / 8000) as u64
    }
}

impl fmt::Display for BitsPerWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1000.0)
    }
}

impl FromStr for BitsPerWeight {
    type Err = SculptError;

    fn from_str(s: &str) -> Result<Self, SculptError> {
        let bits = s.parse::<f64>().ok().filter(|bits| (1.0..=16.0).contains(bits));
        bits.map(|bits| Self((bits * 1000.0).round() as u32)).ok_or_else(|| SculptError::Setting {
            flag: "--bpw",
            found: s.to_owned(),
            expected: "must be bits per weight, 1 to 16, such as 3.25".to_owned(),
        })
    }
}

/// How the backbone's matrices are kept. Norms and routers always stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackboneBits {
    /// As in the checkpoint, whatever float type that is.
    Bf16,
    /// 8-bit codes.
    Q8,
    /// 6-bit codes.
    Q6,
    /// 5-bit codes.
    Q5,
    /// 4-bit codes.
    Q4,
}

impl BackboneBits {
    /// All of them, finest first.
    pub const ALL: [Self; 5] = [Self::Bf16, Self::Q8, Self::Q6, Self::Q5, Self::Q4];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Q8 => "q8",
            Self::Q6 => "q6",
            Self::Q5 => "q5",
            Self::Q4 => "q4",
        }
    }
}

impl BackboneBits {
    /// Bits of a code; 16 for none.
    const fn bits(self) -> u8 {
        match self {
            Self::Bf16 => 16,
            Self::Q8 => 8,
            Self::Q6 => 6,
            Self::Q5 => 5,
            Self::Q4 => 4,
        }
    }
}

impl fmt::Display for BackboneBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackboneBits {
    type Err = SculptError;

    fn from_str(s: &str) -> Result<Self, SculptError> {
        Self::ALL.into_iter().find(|bits| bits.name() == s).ok_or_else(|| SculptError::Setting {
            flag: "--backbone",
            found: s.to_owned(),
            expected: "must be bf16, q8, q6, q5 or q4".to_owned(),
        })
    }
}

/// How the scale of a group of codes is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// It is the group's largest magnitude: the original's rule, and always that of 8-bit codes, of which a search
    /// makes nothing better.
    Absmax,
    /// The one of the lowest squared error, as it will be read, among some that clip the largest weights and some
    /// that do not (EXP-QUANT-01).
    Searched,
}

impl Recipe {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Absmax, Self::Searched];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absmax => "absmax",
            Self::Searched => "searched",
        }
    }

    /// The recipe of a vault whose settings ([`Settings::canonical`]) are `line`; the original's for its own files.
    pub(crate) fn of(line: Option<&str>) -> Self {
        let searched = line.is_some_and(|line| line.split(' ').any(|part| part == "recipe=searched"));
        if searched { Self::Searched } else { Self::Absmax }
    }

    /// The rule for codes of so many bits.
    pub(crate) const fn at(self, bits: u8) -> Self {
        if bits < 8 { self } else { Self::Absmax }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Recipe {
    type Err = SculptError;

    fn from_str(s: &str) -> Result<Self, SculptError> {
        Self::ALL.into_iter().find(|recipe| recipe.name() == s).ok_or_else(|| SculptError::Setting {
            flag: "--recipe",
            found: s.to_owned(),
            expected: "must be absmax or searched".to_owned(),
        })
    }
}

/// What codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Levels {
    /// Evenly spaced levels.
    Uniform,
    /// A table of signed bytes for each of gate, up and down, fitted to the checkpoint's weights (EXP-QUANT-02).
    Fitted,
}

impl Levels {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Uniform, Self::Fitted];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Fitted => "fitted",
        }
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Levels {
    type Err = SculptError;

    fn from_str(s: &str) -> Result<Self, SculptError> {
        Self::ALL.into_iter().find(|levels| levels.name() == s).ok_or_else(|| SculptError::Setting {
            flag: "--levels",
            found: s.to_owned(),
            expected: "must be uniform or fitted".to_owned(),
        })
    }
}

/// A tensor's place in the model, as far as its encoding may depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Role {
    /// A projection of the routed experts of a layer.
    #[expect(dead_code, reason = "mixed precision will ask; today all experts are alike")]
    Expert { layer: u32, projection: Projection },
    /// A backbone tensor.
    Backbone(BackboneTensor),
}

impl Settings {
    /// Checks the values.
    ///
    /// # Errors
    /// Names the flag.
    pub fn validate(&self) -> Result<(), SculptError> {
        let bad = |flag: &'static str, found: usize, expected: &str| {
            Err(SculptError::Setting { flag, found: found.to_string(), expected: expected.to_owned() })
        };
        if !matches!(self.bits, 2..=6 | 8 | 16) {
            return bad("--bits", usize::from(self.bits), "must be 2, 3, 4, 5, 6, 8 or 16");
        }
        if !matches!(self.group, 32 | 64 | 128) {
            return bad("--group", self.group, "must be 32, 64 or 128");
        }
        if self.entropy && !matches!(self.bits, 4 | 16) {
            return bad("--bits", usize::from(self.bits), "must be 4, or not given, with --entropy");
        }
        if let Some(bpw) = self.coded_bpw {
            let found = || format!("{:.2}", f64::from(bpw) / 100.0);
            let wrong = |expected: &str| SculptError::Setting {
                flag: "--bpw",
                found: found(),
                expected: expected.to_owned(),
            };
            if !self.entropy {
                return Err(wrong("needs --entropy"));
            }
            // Sixteen levels hold no more; below, patches would be all there is.
            if !(150..=390).contains(&bpw) {
                return Err(wrong("must be 1.5 to 3.9"));
            }
            if self.bits != 4 {
                return Err(wrong("decides the codes, so that there are none to keep"));
            }
        }
        if self.lossless && self.bpw.is_some() {
            let (found, expected) = ("given".to_owned(), "must not be given with --lossless".to_owned());
            return Err(SculptError::Setting { flag: "--bpw", found, expected });
        }
        if self.lossless && self.bits != 16 {
            return bad("--bits", usize::from(self.bits), "must be 16, or not given, with --lossless");
        }
        if self.lossless && self.backbone != BackboneBits::Bf16 {
            let (found, expected) =
                (self.backbone.to_string(), "must be bf16, or not given, with --lossless");
            return Err(SculptError::Setting { flag: "--backbone", found, expected: expected.to_owned() });
        }
        if self.calibration.is_some()
            && (self.recipe == Recipe::Absmax || (self.bits == 16 && self.bpw.is_none()))
        {
            let (found, expected) = ("given".to_owned(), "needs --recipe searched and --bits 8 or less");
            return Err(SculptError::Setting { flag: "--calibration", found, expected: expected.to_owned() });
        }
        for (flag, value) in [
            ("--max-layers", self.max_layers),
            ("--max-experts", self.max_experts),
            ("--threads", self.threads),
        ] {
            if value == Some(0) {
                return bad(flag, 0, "must be above 0");
            }
        }
        Ok(())
    }

    /// The settings that decide the bytes, as one line.
    #[must_use]
    pub fn canonical(&self, statistics: Option<&Statistics>) -> String {
        let experts = match (self.bpw, self.bits) {
            (Some(bpw), _) => format!("experts=bpw{bpw}/{}", self.group),
            (None, 16) => "experts=source".to_owned(),
            (None, bits) => format!("experts=q{bits}/{}", self.group),
        };
        let backbone = match self.backbone {
            BackboneBits::Bf16 => "source".to_owned(),
            coded => format!("{coded}/{BACKBONE_GROUP}"),
        };
        let cut = |limit: Option<usize>| limit.map_or_else(|| "all".to_owned(), |n| n.to_string());
        let recoded = match (self.keep_experts, self.keep_backbone) {
            (true, true) => "",
            (true, false) => " recoded=backbone",
            (false, true) => " recoded=experts",
            (false, false) => " recoded=all",
        };
        // Equal vaults have equal settings: 8-bit codes and floats know no recipe.
        let bits = if self.bpw.is_some() { 2 } else { self.bits };
        let recipe = match (self.recipe.at(bits), self.recipe.at(self.backbone.bits())) {
            (Recipe::Absmax, Recipe::Absmax) => String::new(),
            _ => format!(" recipe={}", self.recipe),
        };
        let channels = if self.coded_bpw.is_some() { CHANNELS } else { "" };
        let statistics =
            statistics.map_or_else(String::new, |s| format!("{CALIBRATION}{}{channels}", s.name()));
        let levels = if self.fits_levels() { " levels=fitted" } else { "" };
        format!(
            "codec={CODEC} {experts} backbone={backbone} max-layers={} max-experts={}{recoded}{recipe}{levels}{statistics}{}",
            cut(self.max_layers),
            cut(self.max_experts),
            self.coded(),
        )
    }

    fn coded(&self) -> String {
        match (self.entropy, self.coded_bpw) {
            (false, _) => String::new(),
            (true, None) => " entropy".to_owned(),
            (true, Some(bpw)) => format!("{BPW}{}.{:02}", bpw / 100, bpw % 100),
        }
    }

    /// The `coded_bpw` that a canonical line names.
    pub(crate) fn coded_bpw_of(canonical: &str) -> Option<u16> {
        let (whole, hundredths) = canonical.split_once(BPW)?.1.split_once('.')?;
        Some(100 * whole.parse::<u16>().ok()? + hundredths.parse::<u16>().ok()?)
    }

    /// True if experts' codes get levels of their own: entropy codes are of even levels.
    pub(crate) fn fits_levels(&self) -> bool {
        self.levels == Levels::Fitted
            && !self.entropy
            && self.recipe == Recipe::Searched
            && (self.bpw.is_some() || matches!(self.bits, 2..=4))
    }

    /// The same for a checkpoint of floats, where there are no codes to keep: one name for equal vaults.
    pub(crate) fn settled(&self, coded: bool) -> Self {
        let mut settled = self.clone();
        if !coded {
            (settled.keep_experts, settled.keep_backbone) = (true, true);
        }
        settled
    }

    /// The encoding of a tensor whose checkpoint type is `source`: the only place that decides it.
    pub(crate) fn encoding(&self, role: Role, source: Encoding) -> Encoding {
        let source = match (role, source) {
            // Only experts have tables.
            (Role::Backbone(_), Encoding::Table(table)) => Encoding::Uniform(evened(table).0),
            _ => source,
        };
        let (bits, group) = match role {
            Role::Expert { .. } => (self.bits, self.group),
            Role::Backbone(_) => (self.backbone.bits(), BACKBONE_GROUP),
        };
        let keep = match role {
            Role::Expert { .. } => self.keep_experts,
            Role::Backbone(tensor) if !tensor.may_be_coded() => {
                return if source.is_float() { source } else { Encoding::F32 };
            }
            Role::Backbone(_) => self.keep_backbone,
        };
        if keep && !source.is_float() {
            return source;
        }
        // Only 16 names no code, and keeps the source.
        Uniform::new(bits, group, Zero::Symmetric).map_or(source, Encoding::Uniform)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_decides_the_bytes_is_canonical() {
        let line = |settings: &Settings| settings.canonical(None);
        let base = Settings::default();
        let plain = Settings { recipe: Recipe::Absmax, ..base.clone() };
        assert_eq!(line(&plain), "codec=3 experts=q4/64 backbone=q8/64 max-layers=all max-experts=all");
        assert_eq!(line(&base), format!("{} recipe=searched levels=fitted", line(&plain)));
        for settings in [&base, &plain] {
            assert_eq!(Recipe::of(Some(&line(settings))), settings.recipe);
            let eight = Settings { bits: 8, ..(*settings).clone() };
            assert_eq!(line(&eight), line(&Settings { recipe: Recipe::Absmax, ..eight.clone() }));
        }
        assert_eq!(line(&base), line(&Settings { threads: Some(3), force: true, ..base.clone() }));
        assert_ne!(line(&base), line(&Settings { group: 32, ..base.clone() }));
        let raw = Settings { bits: 16, ..base.clone() };
        assert_eq!(line(&raw), line(&Settings { group: 32, ..raw.clone() }));
        assert_ne!(line(&raw), line(&Settings { backbone: BackboneBits::Bf16, ..raw.clone() }));
        assert_ne!(line(&base), line(&Settings { max_layers: Some(3), ..base.clone() }));
        // Entropy codes are of even levels, whatever was asked for.
        let even = Settings { levels: Levels::Uniform, ..base.clone() };
        let coded = Settings { entropy: true, coded_bpw: Some(305), ..base };
        assert_eq!(line(&coded), line(&even) + " entropy bpw=3.05");
        assert_eq!(Settings::coded_bpw_of(&line(&coded)), Some(305));
        let kept = Settings { coded_bpw: None, ..coded };
        assert_eq!((line(&kept), Settings::coded_bpw_of(&line(&kept))), (line(&even) + " entropy", None));
    }

    #[test]
    fn codes_of_an_earlier_version_are_told() {
        let now = Settings::default().canonical(None);
        assert_eq!(codec_of(&now).map(|(codec, _)| codec), Some(CODEC));
        assert_eq!(earlier_codes(&now), None);
        assert_eq!(earlier_codes("somebody else's"), None);
        let before = now.replacen(&format!("codec={CODEC}"), "codec=1", 1);
        let said = earlier_codes(&before).expect("an earlier one");
        assert!(said.contains("codec 1; now") && said.contains("--force"), "{said}");
    }

    #[test]
    fn what_cannot_be_entropy_coded_is_refused() {
        let coded = Settings { entropy: true, coded_bpw: Some(325), ..Settings::default() };
        assert!(coded.validate().is_ok());
        assert!(Settings { coded_bpw: None, bits: 16, ..coded.clone() }.validate().is_ok());
        for (bad, flag) in [
            (Settings { bits: 3, ..coded.clone() }, "--bits"),
            (Settings { bits: 16, ..coded.clone() }, "--bpw"),
            (Settings { entropy: false, ..coded.clone() }, "--bpw"),
            (Settings { coded_bpw: Some(425), ..coded.clone() }, "--bpw"),
            (Settings { coded_bpw: Some(100), ..coded }, "--bpw"),
        ] {
            match bad.validate() {
                Err(SculptError::Setting { flag: found, .. }) => assert_eq!(found, flag),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn norms_and_routers_are_never_coded() {
        use smoe_format::backbone::LayerPart;
        let settings = Settings { backbone: BackboneBits::Q4, ..Settings::default() };
        let of = |tensor| settings.encoding(Role::Backbone(tensor), Encoding::F16);
        assert_eq!(of(BackboneTensor::FinalNorm), Encoding::F16);
        assert_eq!(of(BackboneTensor::Layer(3, LayerPart::Router)), Encoding::F16);
        assert_eq!(of(BackboneTensor::Embed).to_string(), "q4/64");
        for bits in BackboneBits::ALL {
            assert_eq!(bits.name().parse::<BackboneBits>().expect("known"), bits);
        }
        assert!("q7".parse::<BackboneBits>().is_err());
    }
}
