"""What tests of models share."""

from tests.unit.models.conftest import families_are_looked_up_once as families_are_looked_up_once
