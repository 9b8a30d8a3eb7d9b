"""The files of a new project, as `uneven init` writes them: a folder for each template, and what all of them share."""
