"""What every room may use: errors and checks of input. No arrays, no devices, no I/O."""
