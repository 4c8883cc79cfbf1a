package edgelimit

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// answerWith makes the end of a handler chain that answers with a status.
func answerWith(status int) caddyhttp.Handler {
	return caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(status)
		return nil
	})
}

// loginSite limits wrong logins; the test calls its handler with the end of the
// chain that it wants.
func loginSite(t *testing.T, lines string) *instance {
	return newInstance(t, `:80 {
		edge_limit {
			limit login 5/h {
				`+lines+`
			}
		}
	}`)
}

// serve calls the first handler with the end of the chain, and returns the
// status that came out: that of the response, or of the error.
func (i *instance) serve(r *http.Request, next caddyhttp.Handler) int {
	w := &statusWriter{header: make(http.Header)}
	if err := i.handlers[0].ServeHTTP(w, prepared(r, i.server), next); err != nil {
		return statusOf(err)
	}
	return w.code()
}

type statusWriter struct {
	header http.Header
	status int
}

func (w *statusWriter) Header() http.Header { return w.header }
func (w *statusWriter) WriteHeader(status int) {
	if w.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		w.status = status
	}
}
func (w *statusWriter) Write(p []byte) (int, error) { w.WriteHeader(http.StatusOK); return len(p), nil }
func (w *statusWriter) FlushError() error           { w.WriteHeader(http.StatusOK); return nil }
func (w *statusWriter) code() int                   { return max(w.status, 200) }

func TestOnStatus(t *testing.T) {
	cancelled := func(status int) caddyhttp.Handler {
		return caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			r.Context().Value(cancelKey{}).(context.CancelFunc)()
			w.WriteHeader(status)
			return nil
		})
	}
	tests := []struct {
		why   string
		lines string
		next  caddyhttp.Handler
		spent bool
	}{
		{"a right login costs nothing", "on_status 401", answerWith(200), false},
		{"a wrong one is charged", "on_status 401", answerWith(401), true},
		{"another failure is not this one", "on_status 401", answerWith(403), false},
		{"a class of statuses", "on_status 5xx", answerWith(502), true},
		{"one beside the class", "on_status 5xx", answerWith(404), false},
		{"nothing written is 200", "on_status 401", caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }), false},
		{"an error counts as its status", "on_status 401", caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return caddyhttp.Error(401, errors.New("no"))
		}), true},
		{"an error without a status counts as 500", "on_status 500", caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return errors.New("no")
		}), true},
		{"an error with a status that is none is not this one", "on_status 401", caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return caddyhttp.Error(-5, errors.New("no"))
		}), false},
		{"late: nor there", "on_status late 401", caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return caddyhttp.Error(1000, errors.New("no"))
		}), false},
		{"499: who hangs up before the answer has used it", "on_status 401", caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return caddyhttp.Error(499, context.Canceled)
		}), true},
		{"a cancelled request has used it, whatever was written then", "on_status 401", cancelled(200), true},
		{"101 is no answer to the attempt", "on_status 401", answerWith(101), true},
		{"a hijacked connection is no answer to the attempt", "on_status 401", caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			_, _, _ = http.NewResponseController(w).Hijack()
			return nil
		}), true},
		{"a 103 before it is not the final status", "on_status 401", caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			w.WriteHeader(103)
			w.WriteHeader(401)
			return nil
		}), true},
		{"a flush writes 200", "on_status 401", caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			return http.NewResponseController(w).Flush()
		}), false},
		{"late: charged with the response", "on_status late 401", answerWith(401), true},
		{"late: a right one is never charged", "on_status late 401", answerWith(200), false},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			i := loginSite(t, tt.lines)
			for n := range 20 {
				r := requestFrom(alice, "/login")
				ctx, cancel := context.WithCancel(r.Context())
				r = r.WithContext(context.WithValue(ctx, cancelKey{}, cancel))
				denied := i.serve(r, tt.next) == http.StatusTooManyRequests
				cancel()
				expect(t, denied, tt.spent && n >= 5, tt.why)
			}
		})
	}
}

type cancelKey struct{}

// A panic is no answer, so the attempt stays charged.
func TestOnStatusKeepsTheChargeOfAPanic(t *testing.T) {
	i := loginSite(t, "on_status 401")
	for range 5 {
		func() {
			defer func() { _ = recover() }()
			i.serve(requestFrom(alice, "/login"), caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
				panic(http.ErrAbortHandler)
			}))
		}()
	}
	expect(t, i.serve(requestFrom(alice, "/login"), answerWith(200)), http.StatusTooManyRequests, "five panics have used five")
}

// However many wrong attempts come at once, no more of them get through than the
// budget: each is charged before its answer is known.
func TestOnStatusIsStrictUnderConcurrency(t *testing.T) {
	i := loginSite(t, "on_status 401")
	var reached atomic.Int64
	release := make(chan struct{})
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		reached.Add(1)
		<-release
		w.WriteHeader(401)
		return nil
	})
	var wg sync.WaitGroup
	var denied atomic.Int64
	for range 200 {
		wg.Go(func() {
			if i.serve(requestFrom(alice, "/login"), next) == 429 {
				denied.Add(1)
			}
		})
	}
	for denied.Load() < 195 {
		time.Sleep(time.Millisecond) // until all others were refused
	}
	close(release)
	wg.Wait()
	expect(t, reached.Load(), 5, "wrong attempts that reached the upstream")
	expect(t, i.serve(requestFrom(alice, "/login"), answerWith(200)), 429, "and after that none")
}

// Give-backs never add up to more than was taken: what has decayed while the
// answer was awaited is not given back again. Budget 5, five slow right answers,
// then failing attempts: five pass, not more.
func TestGiveBackLeavesWhatHasDecayed(t *testing.T) {
	i := loginSite(t, "on_status 401")
	var wg sync.WaitGroup
	started, release := make(chan struct{}), make(chan struct{})
	for range 5 {
		wg.Go(func() {
			i.serve(requestFrom(alice, "/login"), caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
				started <- struct{}{}
				<-release
				w.WriteHeader(200)
				return nil
			}))
		})
	}
	for range 5 {
		<-started
	}
	i.sleep(2 * time.Hour) // all five have decayed: the budget is whole again
	failed := 0
	for range 3 {
		if i.serve(requestFrom(alice, "/login"), answerWith(401)) == 401 {
			failed++
		}
	}
	close(release) // the slow answers come, and give nothing back
	wg.Wait()
	for range 7 {
		if i.serve(requestFrom(alice, "/login"), answerWith(401)) == 401 {
			failed++
		}
	}
	expect(t, failed, 5, "failing attempts that passed")
}

// A late limit may be overshot by what is in flight, and then denies.
func TestLateOvershootsByWhatIsInFlight(t *testing.T) {
	i := loginSite(t, "on_status late 401")
	var wg sync.WaitGroup
	var arrived sync.WaitGroup
	arrived.Add(12)
	for range 12 {
		wg.Go(func() {
			status := i.serve(requestFrom(alice, "/login"), caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
				arrived.Done()
				arrived.Wait() // all are in flight before the first answer
				w.WriteHeader(401)
				return nil
			}))
			expect(t, status, 401, "nothing was charged yet")
		})
	}
	wg.Wait()
	expect(t, i.serve(requestFrom(alice, "/login"), answerWith(200)), 429, "after that the budget is used up")
}

func TestBan(t *testing.T) {
	tests := []struct {
		why    string
		lines  string
		tries  []time.Duration // times of attempts after the first denial
		passes time.Duration   // when a request passes again, after the first denial
	}{
		{"out for ten minutes from the first denial", "burst 1\nban 10m", []time.Duration{time.Minute, 9 * time.Minute}, 12 * time.Minute},
		{"a ban outlasts the wait", "burst 1\nban 1h", []time.Duration{30 * time.Minute}, time.Hour},
		{"extended: counted from the last attempt", "burst 1\nban 1h extend", []time.Duration{50 * time.Minute}, 110 * time.Minute},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			i := loginSite(t, tt.lines)
			get := func() int { return i.serve(requestFrom(alice, "/"), answerWith(200)) }
			expect(t, get(), 200, "the first passes")
			expect(t, get(), 429, "the second is denied")
			at := time.Duration(0)
			for _, try := range tt.tries {
				i.sleep(try - at)
				at = try
				expect(t, get(), 429, "an attempt after "+try.String())
			}
			expect(t, i.serve(requestFrom(bob, "/"), answerWith(200)), 200, "nobody else is banned")
			probe := i.handlers[0].keyed[0]
			key, _ := probe.template.hash(&resolution{client: mustAddr(alice)}, nil)
			_, ok := probe.peek(key, probe.gcra.emissionInterval, i.now.Load()+int64(tt.passes-at)-1)
			expect(t, ok, false, "just before "+tt.passes.String())
			i.sleep(tt.passes - at)
			expect(t, get(), 200, "after "+tt.passes.String())
		})
	}
}

// Retry-After of a banned client says when it passes again, ban and wait both.
func TestBanRetryAfter(t *testing.T) {
	i := newInstance(t, `:80 {
		edge_limit {
			limit a 1/h {
				ban 2h
			}
			limit b 100/h
		}
		respond ok
	}`)
	expect(t, i.get(alice, "/"), 200, "the first passes")
	expect(t, i.send(requestFrom(alice, "/")).Header().Get("Retry-After"), "7200", "the ban just began")
	limit := i.handlers[0].keyed[1]
	key, _ := limit.template.hash(&resolution{client: mustAddr(alice)}, nil)
	expect(t, limit.gcra.remaining(limit.state.ledger.Load().Peek(key, i.now.Load()), i.now.Load()), 99, "another limit does not ban, nor is it charged")
	i.sleep(30 * time.Minute)
	expect(t, i.send(requestFrom(alice, "/")).Header().Get("Retry-After"), "5400", "half an hour later")
}

func TestCostByPlaceholder(t *testing.T) {
	tests := []struct {
		why    string
		header string
		passes int // of ten requests, with a burst of ten
		retry  bool
	}{
		{"a number takes so many", "5", 2, true},
		{"a fraction too", "2.5", 4, true},
		{"nothing counts as 1", "", 10, true},
		{"a negative number counts as 1", "-1", 10, true},
		{"zero counts as 1", "0", 10, true},
		{"a word counts as 1", "abc", 10, true},
		{"not a number counts as 1", "NaN", 10, true},
		{"above the burst never passes, and waiting does not help", "11", 0, false},
		{"1e9 is a number above the burst", "1e9", 0, false},
		{"so is one that no float64 holds", "1e309", 0, false},
		{"and one of many digits", strings.Repeat("9", 1000), 0, false},
		{"one below all that a float64 holds is zero", "1e-400", 10, true},
		{"infinity is no number", "Inf", 10, true},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			i := newInstance(t, `:80 {
				edge_limit {
					limit uploads 10/h {
						cost {http.request.header.X-Cost}
					}
					ceiling all 1000/s
				}
				respond ok
			}`)
			expect(t, i.passed(10, alice, "/", "X-Cost: "+tt.header), tt.passes, tt.why)
			for range 10 {
				i.get(alice, "/", "X-Cost: "+tt.header)
			}
			w := i.send(requestFrom(alice, "/", "X-Cost: "+tt.header))
			expect(t, w.Code, 429, "the budget is used up")
			expect(t, w.Header().Get("Retry-After") != "", tt.retry, "whether waiting helps")
		})
	}
}

func TestInFlight(t *testing.T) {
	hold := func(i *instance, n int, peer string) (release func()) {
		var started, done sync.WaitGroup
		end := make(chan struct{})
		started.Add(n)
		for range n {
			done.Go(func() {
				i.serve(requestFrom(peer, "/"), caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
					started.Done()
					<-end
					return nil
				}))
			})
		}
		started.Wait()
		return func() { close(end); done.Wait() }
	}
	site := func(t *testing.T, lines string) *instance {
		return newInstance(t, `{
			edge_limit {
				max_keys 2
			}
		}
		:80 {
			edge_limit {
				in_flight busy 3 {
					`+lines+`
				}
			}
		}`)
	}
	t.Run("of everybody", func(t *testing.T) {
		i := site(t, "")
		release := hold(i, 3, alice)
		expect(t, i.serve(requestFrom(bob, "/"), answerWith(200)), 503, "the fourth, whoever it is")
		release()
		expect(t, i.serve(requestFrom(bob, "/"), answerWith(200)), 200, "when they are gone")
		expect(t, i.handlers[0].inFlight[0].state.running.inFlight(), 0, "none is left over")
	})
	t.Run("of each key", func(t *testing.T) {
		i := site(t, "key client")
		release := hold(i, 3, alice)
		defer release()
		expect(t, i.serve(requestFrom(alice, "/"), answerWith(200)), 429, "the fourth of one client")
		expect(t, i.serve(requestFrom(bob, "/"), answerWith(200)), 200, "another client")
	})
	t.Run("a full table of other keys denies", func(t *testing.T) {
		i := site(t, "key client")
		release := hold(i, 1, alice)
		defer release()
		releaseBob := hold(i, 1, bob)
		expect(t, i.serve(requestFrom("203.0.113.9", "/"), answerWith(200)), 429, "a third key where two are remembered")
		expect(t, i.serve(requestFrom(bob, "/"), answerWith(200)), 200, "a key that is known")
		releaseBob()
		expect(t, i.serve(requestFrom("203.0.113.9", "/"), answerWith(200)), 200, "when there is room")
	})
	t.Run("a panic leaves too", func(t *testing.T) {
		i := site(t, "")
		func() {
			defer func() { _ = recover() }()
			i.serve(requestFrom(alice, "/"), caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { panic("no") }))
		}()
		expect(t, i.handlers[0].inFlight[0].state.running.inFlight(), 0, "after a panic")
	})
	t.Run("observed: counted, never denied", func(t *testing.T) {
		i := site(t, "observe")
		release := hold(i, 5, alice)
		expect(t, i.handlers[0].inFlight[0].state.count(outcomeWouldDeny), 2, "two above three")
		release()
		expect(t, i.handlers[0].inFlight[0].state.running.inFlight(), 0, "only who was counted leaves")
	})
}

// All kinds together are all or nothing: what a later budget denies takes nothing
// from an earlier one, nor stays in flight.
func TestAllKindsTogether(t *testing.T) {
	i := newInstance(t, `:80 {
		edge_limit {
			limit calm 2/h {
				ban 1h
			}
			limit wrong 5/h {
				on_status 401
			}
			in_flight busy 10
			ceiling all 3/h
		}
		respond ok
	}`)
	expect(t, i.passed(2, alice, "/"), 2, "the limit's two")
	expect(t, i.passed(1, bob, "/"), 1, "the ceiling's third")
	for range 5 {
		expect(t, i.get(bob, "/"), 503, "the ceiling is used up")
	}
	h := i.handlers[0]
	now := i.now.Load()
	bobKey := func(l *Limit) uint64 {
		key, _ := l.template.hash(&resolution{client: mustAddr(bob)}, nil)
		return key
	}
	expect(t, h.keyed[0].gcra.remaining(h.keyed[0].state.ledger.Load().Peek(bobKey(h.keyed[0]), now), now), 1, "one of two was used")
	expect(t, h.keyed[1].gcra.remaining(h.keyed[1].state.ledger.Load().Peek(bobKey(h.keyed[1]), now), now), 5, "a right answer gives all back")
	expect(t, h.inFlight[0].state.running.inFlight(), 0, "nothing stays in flight")
	expect(t, h.keyed[0].banned(bobKey(h.keyed[0]), now), 0, "a ceiling's denial is no ban")
}

func mustAddr(text string) netip.Addr { return netip.MustParseAddr(text) }
