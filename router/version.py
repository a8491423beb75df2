"""The service's version, as GET /version tells it."""

VERSION = "0.1.0"
