//! The suites that look at the whole tree from the outside: `tests/tidy` reads it. What one package promises is tested
//! in that package.
