"""Records of runs, as files, tables and figures."""
