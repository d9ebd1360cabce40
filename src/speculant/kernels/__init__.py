"""Operations under the models. `reference` defines what is correct."""
