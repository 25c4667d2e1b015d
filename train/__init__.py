"""The Lightning side: trains adapters for the library in `sekv`."""
