"""Run directory -> HTML, figures, certificate checks; reads files, never live objects."""
