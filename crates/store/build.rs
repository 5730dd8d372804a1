//! Tells rustc of the `loom` cfg, under which the slot machine and the queue are model-checked.
fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rerun-if-changed=build.rs");
}
