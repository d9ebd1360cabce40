from .fairness import (
    TURN as TURN,
    Account as Account,
    Accounts as Accounts,
    Holding as Holding,
    divide as divide,
    places_of as places_of,
    yields as yields,
)
from .policy import PATIENCE as PATIENCE, POLICIES as POLICIES, Key as Key, Standing as Standing
from .schedule import NO_DRAFT as NO_DRAFT, Schedule as Schedule, Scheduled as Scheduled
from .scheduler import Scheduler as Scheduler
from .waiting import WaitingQueue as WaitingQueue, WaitingRequests as WaitingRequests
from .work_budget import ALONE_S as ALONE_S, STEP_S as STEP_S, WorkBudget as WorkBudget
