// A parallel region that waits for no thread that has not begun to work in it.
#pragma once

// Call work(context) in this thread, and in up to `threads` - 1 others that belong to it. Return when this thread's call and all
// others that began have ended; a thread that the system has not scheduled by then takes no part. So the work must be complete
// when any one call returns, as it is if the calls take it from work queues, and other programs can't delay it by keeping a
// processor busy. Not to be called from within `work`.
__attribute__((visibility("hidden"))) void sp_run_together(int threads, void (*work)(void *), void *context);
