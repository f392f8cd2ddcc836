"""Edits of launch files that exist: settings in place, further ones beside their neighbours, the rest as it is."""
