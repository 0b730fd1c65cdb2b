"""Loading and saving of EAGLE and Medusa heads as (config, params)."""
