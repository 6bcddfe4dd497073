//! What the whole tree keeps to, and no compiler checks. Each rule names the place that breaks it and says what to do.
//! They read text: what a rule can't see, a reviewer has to.

mod code;
mod commands;
mod dependencies;
mod documents;
mod requirements;
mod source;
mod tree;
