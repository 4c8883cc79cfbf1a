package e2e

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// What cannot be a store, each in a way of its own, has a state that says what is
// wrong, in the admin API, the metrics and one line of the log. Requests are
// served all the same.
func TestFleetBadStores(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	for _, row := range []struct {
		name  string
		store func(t *testing.T) (options []string)
		state string
		says  string // a part of the error, which says what to do
	}{
		{"nobody listens", func(t *testing.T) []string { return []string{"address " + freeAddr(t)} }, "network", "refused"},
		{"somebody who never answers", func(t *testing.T) []string {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { listener.Close() })
			return []string{"address " + listener.Addr().String()}
		}, "timeout", "timeout"},
		{"a wrong password", func(t *testing.T) []string {
			return []string{"address " + startRedis(t, "requirepass right").addr, "password wr0ng-passw0rd"}
		}, "auth", "see username and password"},
		{"no password", func(t *testing.T) []string { return []string{"address " + startRedis(t, "requirepass right").addr} }, "auth", "see username and password"},
		{"a user who is not known", func(t *testing.T) []string {
			return []string{"address " + startRedis(t).addr, "username nobody", "password wr0ng-passw0rd"}
		}, "auth", "see username and password"},
		{"a user who may do too little", func(t *testing.T) []string {
			return []string{"address " + startRedis(t, "user limiter on >wr0ng-passw0rd ~* -@all +@connection +info +eval +evalsha").addr,
				"username limiter", "password wr0ng-passw0rd"}
		}, "auth", "the user may run"},
		{"a user for another prefix", func(t *testing.T) []string {
			return []string{"address " + startRedis(t, scriptUser("limiter", "wr0ng-passw0rd", "other")).addr, "username limiter", "password wr0ng-passw0rd"}
		}, "auth", "the user may run"},
		{"TLS to a server without", func(t *testing.T) []string { return []string{"address " + startRedis(t).addr, "tls"} }, "tls", "both sides speak TLS"},
		{"a server with TLS, without", func(t *testing.T) []string {
			r, _ := startTLSRedis(t)
			return []string{"address " + r.addr}
		}, "tls", "both sides speak TLS"},
		{"another authority", func(t *testing.T) []string {
			r, _ := startTLSRedis(t)
			other, _ := selfSigned(t)
			return []string{"address localhost:" + portOf(r.addr), "tls " + other}
		}, "tls", "authority"},
		{"a certificate of another name", func(t *testing.T) []string {
			r, ca := startTLSRedis(t)
			return []string{"address " + r.addr, "tls " + ca}
		}, "tls", "authority"},
		{"a web server", func(t *testing.T) []string {
			server := httptest.NewServer(http.NotFoundHandler())
			t.Cleanup(server.Close)
			return []string{"address " + server.Listener.Addr().String()}
		}, "not_redis", "a Redis or Valkey"},
		{"a Sentinel as a server", func(t *testing.T) []string { return []string{"address " + startSentinels(t).addresses()[0]} }, "not_redis", "add master_name"},
		{"a server as a Sentinel", func(t *testing.T) []string {
			return []string{"address " + startRedis(t).addr, "master_name " + masterName}
		}, "not_redis", "a Redis or Valkey"},
		{"Sentinels that do not know the master", func(t *testing.T) []string {
			return []string{"address " + strings.Join(startSentinels(t).addresses(), " "), "master_name nobody"}
		}, "other", "master"},
		{"a replica", func(t *testing.T) []string { return []string{"address " + startReplica(t, startRedis(t)).addr} }, "read_only", "the master's"},
		{"a node of a cluster that has our slot", func(t *testing.T) []string {
			has, _ := startCluster(t).ofSlot(t, "{fleet}")
			return []string{"address " + has.addr}
		}, "cluster", "several of its nodes"},
		{"a node of a cluster that has it not", func(t *testing.T) []string {
			_, hasNot := startCluster(t).ofSlot(t, "{fleet}")
			return []string{"address " + hasNot.addr}
		}, "cluster", "several of its nodes"},
		{"servers that are no cluster", func(t *testing.T) []string {
			return []string{"address " + startRedis(t).addr + " " + startRedis(t).addr}
		}, "not_redis", "a Redis or Valkey"},
		{"a database that is not there", func(t *testing.T) []string { return []string{"address " + startRedis(t).addr, "database 99"} }, "other", "DB index"},
		{"in use with another pepper", func(t *testing.T) []string {
			r := startRedis(t)
			f := startFleet(t, 1, storeOptions("address "+r.addr), func(addr string) string { return site(addr, "respond ok") })
			f.awaitState(t, "connected")
			r.must(t, "SET", "edge_limit:{fleet}:pepper", "0123456789abcdef") // as a check looks
			return []string{"address " + r.addr}
		}, "other_pepper", "the same pepper"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			options := row.store(t)
			f := startFleet(t, 1, storeOptions(options...), func(addr string) string {
				return site(addr, "edge_limit {\nlimit per_client 3/h\nin_flight at_once 10\nceiling all 100/h\n}\nrespond ok")
			})
			c := f.caddys[0]
			state := c.awaitState(t, row.state)
			if !strings.Contains(state.Error, row.says) {
				t.Errorf("the error does not say %q: %s", row.says, state.Error)
			}
			client := clientFrom(t, visitorIP(0))
			for n, want := range []int{ok, ok, ok, denied} {
				begin := time.Now()
				if a := get(t, client, f.url("/")); a.status != want {
					t.Errorf("request %d: status %d, want %d", n+1, a.status, want)
				}
				if took := time.Since(begin); took > 5*time.Second {
					t.Errorf("request %d took %v", n+1, took)
				}
			}
			time.Sleep(700 * time.Millisecond) // some attempts more
			// A machine that stands still for half a second makes an attempt time out: the
			// log tells of that, and of the first reason when it is back.
			stalls := 0
			if row.state != "timeout" {
				stalls = c.output.linesWith("the store cannot be used", `"state":"timeout"`)
			}
			if stalls > 0 {
				t.Logf("%d attempts took too long", stalls)
				c.awaitState(t, row.state)
			} else if after := c.store(t); after.State != row.state || after.Since != state.Since {
				t.Errorf("the state did not stay: %+v, then %+v", state, after)
			}
			if n := c.metric(t, `caddy_edge_limit_store_state{state="`+row.state+`"}`); n != 1 {
				t.Errorf("the metric of the state is %v", n)
			}
			if n := c.metric(t, `caddy_edge_limit_store_state{state="connected"}`); n != 0 {
				t.Errorf("the metric says that it is connected: %v", n)
			}
			all, own := c.output.linesWith("the store cannot be used"), c.output.linesWith("the store cannot be used", `"state":"`+row.state+`"`)
			if all != own+stalls || own != 1+stalls {
				t.Errorf("%d lines of the log say that the store cannot be used, %d of them why", all, own)
			}
			if strings.Contains(c.output.String()+state.Error+c.metrics(t), "wr0ng-passw0rd") {
				t.Error("the password is shown")
			}
		})
	}
}

// What other programs write under our keys is never trusted: it denies nobody for
// longer than the limit could, it lets nobody pass more than it may, it is
// counted, and it goes.
func TestFleetGarbage(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	r := startRedis(t)
	f := startFleet(t, 1, storeOptions("address "+r.addr, "timeout 5s"), func(addr string) string {
		return site(addr, `
			handle /limit {
				edge_limit {
					limit limit 2/2s {
						ban 2s
					}
				}
				respond ok
			}
			handle /in_flight {
				edge_limit {
					in_flight in_flight 2
				}
				respond ok
			}
			handle /ceiling {
				edge_limit {
					ceiling ceiling 5/s
				}
				respond ok
			}`)
	})
	f.awaitState(t, "connected")
	c := f.caddys[0]
	year := strconv.FormatInt(time.Now().Add(365*24*time.Hour).UnixMicro(), 10)
	week := strconv.FormatInt(time.Now().Add(7*24*time.Hour).UnixMicro(), 10)

	for n, row := range []struct {
		name, path string
		write      [][]string // KEY is ours
		counted    bool
	}{
		{"a list for a limit", "/limit", [][]string{{"RPUSH", "KEY", "a", "b"}}, true},
		{"a hash for a limit", "/limit", [][]string{{"HSET", "KEY", "a", "b"}}, true},
		{"text for a limit", "/limit", [][]string{{"SET", "KEY", "hello, who are you?"}}, true},
		{"nothing for a limit", "/limit", [][]string{{"SET", "KEY", ""}}, true},
		{"bytes for a limit", "/limit", [][]string{{"SET", "KEY", "\x00\xff\r\n 1 \x00 2"}}, true},
		{"not a number for a limit", "/limit", [][]string{{"SET", "KEY", "nan nan nan"}}, true},
		{"infinity for a limit", "/limit", [][]string{{"SET", "KEY", "inf 1 inf"}}, true},
		{"a TAT a year ahead", "/limit", [][]string{{"SET", "KEY", year + " 2000000 0"}}, true},
		{"a TAT a year ahead of an old clock", "/limit", [][]string{{"SET", "KEY", year + " 2000000 0 id " + year + " 1000000"}}, true},
		{"a tolerance of a year", "/limit", [][]string{{"SET", "KEY", week + " 31536000000000 0"}}, false},
		{"a tolerance of next to nothing", "/limit", [][]string{{"SET", "KEY", year + " 1e-300 0"}}, true},
		{"a ban a year ahead", "/limit", [][]string{{"SET", "KEY", "0 2000000 " + year}}, true},
		{"a TAT in the past", "/limit", [][]string{{"SET", "KEY", "-5 2000000 -5"}}, false},
		{"a megabyte", "/limit", [][]string{{"SET", "KEY", strings.Repeat("9 ", 1<<19)}}, true},
		{"text for an in_flight", "/in_flight", [][]string{{"SET", "KEY", "hello"}}, true},
		{"requests in flight for a year", "/in_flight", [][]string{{"ZADD", "KEY", year, "a", year, "b", "+inf", "c"}}, true},
		{"text for a ceiling", "/ceiling", [][]string{{"SET", "KEY", "hello"}}, true},
		{"text in a ceiling", "/ceiling", [][]string{{"HSET", "KEY", "width", "50000", "hello", "world", "5", "many", "few", "7"}}, true},
		{"a ceiling of another width", "/ceiling", [][]string{{"HSET", "KEY", "width", "hello", "5", "7"}}, false},
		{"slots that are no numbers", "/ceiling", [][]string{{"HSET", "KEY", "width", "50000", "nan", "1", "inf", "1", "-inf", "1", "1e400", "2", "7.5", "3"}}, true},
		{"permits that are no numbers", "/ceiling", [][]string{{"HSET", "KEY", "width", "50000", "5", "nan", "6", "inf", "7", "-1"}}, true},
		{"slots a year ahead", "/ceiling", [][]string{{"HSET", "KEY", "width", "50000", year[:len(year)-4], "1e14", "99999999999999999999", "5"}}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			const garbage = `caddy_edge_limit_store_errors_total{kind="garbage"}`
			client := clientFrom(t, visitorIP(n))
			key := f.ourKey(t, r, client, row.path)
			r.must(t, "DEL", key)
			errorsBefore, before := c.storeErrors(t), c.metric(t, garbage)
			for _, command := range row.write {
				for i := range command {
					if command[i] == "KEY" {
						command[i] = key
					}
				}
				r.must(t, command...)
			}
			if row.path == "/in_flight" { // these count for as long as ours may
				if a := get(t, client, f.url(row.path)); a.status != ok && a.status != http.StatusServiceUnavailable {
					t.Errorf("status %d", a.status)
				}
				eventually(t, "what is in flight ends within the longest time", func() bool {
					scores, err := r.do("ZRANGE", key, "0", "-1", "WITHSCORES")
					if err != nil {
						return false
					}
					list, _ := scores.([]any)
					for i := 1; i < len(list); i += 2 {
						if at, err := strconv.ParseFloat(fmt.Sprint(list[i]), 64); err != nil || at > float64(time.Now().Add(31*time.Second).UnixMicro()) {
							return false
						}
					}
					return true
				})
				r.must(t, "DEL", key)
			}
			begin := time.Now()
			status := 0
			counted := func() bool { return c.metric(t, garbage) > before }
			for status != ok || row.counted && !counted() { // a permit that is held needs no store
				a := get(t, client, f.url(row.path))
				status = a.status
				if status != ok && status != denied && status != http.StatusServiceUnavailable || time.Since(begin) > 6*time.Second {
					t.Fatalf("%v after it was written: status %d, Retry-After %q", time.Since(begin), status, a.header.Get("Retry-After"))
				}
				if wait, _ := strconv.Atoi(a.header.Get("Retry-After")); wait > 3 {
					t.Fatalf("Retry-After %d", wait)
				}
				time.Sleep(20 * time.Millisecond)
			}
			if n := c.metric(t, garbage) - before; (n == 0) == row.counted || n > 200 {
				t.Errorf("%v values were counted as not ours", n)
			}
			if errors := c.storeErrors(t); errors != errorsBefore {
				t.Errorf("the store could not be asked: %v, then %v", errorsBefore, errors)
			}
		})
	}
	if state := c.store(t); state.State != "connected" {
		t.Errorf("the store is %s: %s", state.State, state.Error)
	}
}

// storeErrors are all that are counted, but for garbage.
func (c *caddy) storeErrors(t *testing.T) (errors string) {
	t.Helper()
	for line := range strings.Lines(c.metrics(t)) {
		if strings.HasPrefix(line, "caddy_edge_limit_store_errors_total") && !strings.Contains(line, "garbage") && !strings.HasSuffix(line, " 0\n") {
			errors += line
		}
	}
	return errors
}

// ourKey finds the key of a path's budget: that which comes into being with a
// request.
func (f *fleet) ourKey(t *testing.T, r *redis, client http.RoundTripper, path string) string {
	t.Helper()
	kind := map[string]string{"/limit": "l", "/in_flight": "f", "/ceiling": "c"}[path]
	conn, err := r.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.do("MONITOR"); err != nil {
		t.Fatal(err)
	}
	found := make(chan string, 1)
	go func() {
		for {
			line, err := conn.reader.ReadString('\n')
			if err != nil {
				return
			}
			if _, rest, ok := strings.Cut(line, `"edge_limit:`+kind+`:`); ok {
				name, _, _ := strings.Cut(rest, `"`)
				found <- "edge_limit:" + kind + ":" + name
				return
			}
		}
	}()
	for begin := time.Now(); time.Since(begin) < patience; time.Sleep(50 * time.Millisecond) {
		get(t, client, f.url(path))
		select {
		case key := <-found:
			return key
		default:
		}
	}
	t.Fatalf("nothing came to the store for %s", path)
	return ""
}
