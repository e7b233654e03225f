"""What is to be computed: frozen problems from shapes, dtypes, strides and options. Every error of a user is raised here."""
