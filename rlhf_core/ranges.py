"""The types of values in params.yaml, and what all its groups have in common: strict, frozen, nothing unknown."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A group of params.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
