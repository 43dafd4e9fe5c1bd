"""The version of the distribution, its images and its chart."""

__version__ = "0.1.0"
