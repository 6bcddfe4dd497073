mod absence;
mod bounds;
mod chaos;
mod identity;
mod model;
mod world;
