"""One validated study from one TOML file; knows no method."""
