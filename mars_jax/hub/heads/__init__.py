"""Loading and saving of EAGLE heads and MTP modules as (config, params), and code that other heads share."""
