"""One thread steps the backend; handles on any loop or thread submit to it and listen."""
