"""Loading and saving of EAGLE heads and MTP modules as (config, params), and code shared with other kinds of head."""
