//! Examples: one idea a file.
//!
//! - `embed`: the runtime inside somebody's own tokio program, with their own engine.
//! - `mobile_endpoints`: an endpoint that dies, comes back, moves and leaves, with a step in flight each time.
//! - `two_stage_pipeline`: discovery through a directory, and a tensor from one stage to the next.
//! - `supervisor_tree`: a panic at each level, and who starts what again.
