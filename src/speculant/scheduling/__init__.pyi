from .order import (
    PATIENCE as PATIENCE,
    POLICIES as POLICIES,
    TURN as TURN,
    Account as Account,
    Accounts as Accounts,
    Holding as Holding,
    Key as Key,
    Standing as Standing,
    WaitingQueue as WaitingQueue,
    WaitingRequests as WaitingRequests,
    divide as divide,
    places_of as places_of,
    yields as yields,
)
from .preparing import PREPARED as PREPARED, Preparation as Preparation, Preparations as Preparations
from .scheduler import (
    ALONE_S as ALONE_S,
    NO_DRAFT as NO_DRAFT,
    STEP_S as STEP_S,
    Schedule as Schedule,
    Scheduled as Scheduled,
    Scheduler as Scheduler,
    WorkBudget as WorkBudget,
)
