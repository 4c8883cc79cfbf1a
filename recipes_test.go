package edgelimit

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// The recipes of the docs are run as they stand there, by a real Caddy before a
// real upstream, and each item of the lists under them is checked. Only what a
// test cannot have is replaced: the port, the upstreams, and who connects. All
// connections come from one address, so the test is a proxy that says for which
// client it speaks. The clock stands still unless a check moves it.

const recipesPath = "docs/recipes.md"

// recipe is a section of the docs with a Caddyfile in it.
type recipe struct {
	title     string
	caddyfile string
	claims    []string // the items of the list under the Caddyfile

	t       *testing.T
	checked map[string]bool // of the claims

	app       http.HandlerFunc // how app:3000 answers; nil: 200
	auth      http.HandlerFunc // the same for auth:3000
	fromRange string           // the connection comes from this range of the Caddyfile
}

// recipeChecks are what is checked, by the title of the recipe.
var recipeChecks = map[string]func(*recipe){
	"A site behind nginx":       checkBehindNginx,
	"Login":                     checkLogin,
	"Password reset":            checkPasswordReset,
	"A public API with keys":    checkPublicAPI,
	"An API with verified keys": checkVerifiedAPI,
	"An error sink":             checkErrorSink,
	"Uploads by size":           checkUploads,
	"Uploads without a size":    checkUnmeasuredUploads,
	"Scraping":                  checkScraping,
	"WebSockets":                checkWebSockets,
	"Behind Cloudflare":         checkCloudflare,
	"Allowlists":                checkAllowlists,
	"A trial run":               checkTrialRun,
}

func TestRecipes(t *testing.T) {
	recipes := readRecipes(t)
	for title := range recipeChecks {
		if recipes[title] == nil {
			t.Errorf("%s has no recipe %q, for which there is a check", recipesPath, title)
		}
	}
	for title, r := range recipes {
		t.Run(title, func(t *testing.T) {
			check := recipeChecks[title]
			if check == nil {
				t.Fatal("the recipe has no check: write one, and name it in recipeChecks")
			}
			if formatted := caddyfile.Format([]byte(r.caddyfile)); string(formatted) != r.caddyfile {
				t.Errorf("caddy fmt would write this as\n%s", formatted)
			}
			r.t, r.checked = t, make(map[string]bool)
			check(r)
			for _, claim := range r.claims {
				if !r.checked[claim] {
					t.Errorf("nothing checks what the text says: %q", claim)
				}
			}
		})
	}
}

// readRecipes reads the sections that have a Caddyfile, by title.
func readRecipes(t *testing.T) map[string]*recipe {
	t.Helper()
	text, err := os.ReadFile(recipesPath)
	if err != nil {
		t.Fatal(err)
	}
	const fence, caddyfileFence = "```", "```caddyfile"
	recipes := make(map[string]*recipe)
	section, block := new(recipe), ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		switch last := len(section.claims) - 1; {
		case block != "" && line == fence:
			block = ""
		case block == caddyfileFence:
			section.caddyfile += line + "\n"
		case block != "":
		case strings.HasPrefix(line, fence):
			if block = line; line != caddyfileFence {
				continue
			}
			if section.caddyfile != "" || recipes[section.title] != nil {
				t.Errorf("%q has two Caddyfiles: give each a heading of its own", section.title)
			}
			recipes[section.title] = section
		case strings.HasPrefix(line, "#"):
			section = &recipe{title: strings.TrimLeft(line, "# ")}
		case strings.HasPrefix(line, "- ") && section.caddyfile != "":
			section.claims = append(section.claims, line[2:])
		case strings.HasPrefix(line, "  ") && last >= 0:
			section.claims[last] += line[1:]
		}
	}
	return recipes
}

// does checks the claim that begins like this, with a Caddy that runs the recipe
// and knows of no request yet.
func (r *recipe) does(beginning string, check func(s *servedRecipe)) {
	r.t.Helper()
	for _, claim := range r.claims {
		if strings.HasPrefix(claim, beginning) {
			r.checked[claim] = true
			r.t.Run(beginning, func(t *testing.T) { check(r.serve(t)) })
			return
		}
	}
	r.t.Errorf("the text does not say any more: %q", beginning)
}

func checkBehindNginx(r *recipe) {
	r.fromRange = "10.0.0.10"
	of := func(client, method, path string) func(int) recipeRequest {
		return func(int) recipeRequest { return recipeRequest{client: client, method: method, path: path} }
	}
	r.does("A visitor is the address that nginx appended", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(20, func(n int) recipeRequest {
			return recipeRequest{client: manyClients(n) + ", " + oneClient, method: "GET", path: "/"}
		}), 200, 10, 429, 10)
		s.wantTold(oneClient)
	})
	r.does("Ten requests at once pass of each visitor", func(s *servedRecipe) {
		for n := range 3 {
			s.wantStatuses(s.statuses(11, of(manyClients(n), "GET", "/")), 200, 10, 429, 1)
		}
	})
	r.does("After five attempts to log in the sixth gets 429", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(6, of(oneClient, "POST", "/login")), 200, 5, 429, 1)
		s.wantStatus(of(oneClient, "GET", "/")(0), 200)
		s.later(11 * time.Second)
		s.wantStatus(of(oneClient, "POST", "/login")(0), 429)
		s.later(time.Second)
		s.wantStatus(of(oneClient, "POST", "/login")(0), 200)
	})
	r.does("No more than a thousand requests in any second reach the app", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(1100, func(n int) recipeRequest { return of(manyClients(n), "GET", "/")(n) }), 200, 1000, 503, 100)
		s.later(2 * time.Second)
		s.wantStatuses(s.statuses(10, of(manyClients(1099), "GET", "/")), 200, 10)
	})
}

// rightPassword is what the app of checkLogin answers with 200.
const rightPassword = "right"

func checkLogin(r *recipe) {
	attempt := func(password string) recipeRequest {
		return recipeRequest{method: "POST", path: "/login", header: map[string]string{"X-Password": password}}
	}
	right, wrong := attempt(rightPassword), attempt("wrong")
	r.app = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/login" && r.Method == http.MethodPost && r.Header.Get("X-Password") != rightPassword {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}
	r.does("Right passwords use nothing up", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(50, always(right)), 200, 50)
		s.wantStatuses(s.statuses(10, always(wrong)), 401, 10)
	})
	r.does("After ten wrong passwords the eleventh attempt gets 429", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(10, always(wrong)), 401, 10)
		s.wantDenied(wrong, 429, "900")
		s.wantSeen(s.app, 10)
	})
	r.does("Forty wrong passwords at the same moment", func(s *servedRecipe) {
		s.wantStatuses(s.atTheSameTime(40, wrong)(), 401, 10, 429, 30)
		s.wantSeen(s.app, 10)
	})
	r.does("While a client is banned, its right password gets 429 too", func(s *servedRecipe) {
		s.statuses(11, always(wrong))
		s.wantDenied(right, 429, "900")
		s.wantStatus(recipeRequest{client: anotherClient, method: "POST", path: "/login", header: right.header}, 200)
		s.wantStatus(recipeRequest{method: "GET", path: "/login"}, 200)
		s.wantStatus(recipeRequest{method: "GET", path: "/"}, 200)
	})
	r.does("After 15 minutes the client can try again", func(s *servedRecipe) {
		s.statuses(11, always(wrong))
		s.later(15*time.Minute - time.Second)
		s.wantDenied(wrong, 429, "1")
		s.later(time.Second)
		s.wantStatuses(s.statuses(3, always(wrong)), 401, 2, 429, 1)
	})
	r.does("An attempt is charged while it is being answered", func(s *servedRecipe) {
		release := s.holdAnswers()
		wait := s.atTheSameTime(10, right)
		s.waitUntil("ten attempts at the app", func() bool { return s.app.seen() == 10 })
		s.wantStatus(right, 429)
		release()
		s.wantStatuses(wait(), 200, 10)
	})
	r.does("However many addresses take part, no more than 300 attempts", func(s *servedRecipe) {
		got := s.statuses(350, func(n int) recipeRequest {
			return recipeRequest{client: manyClients(n), method: "POST", path: "/login"}
		})
		s.wantStatuses(got, 401, 300, 503, 50)
		s.wantSeen(s.app, 300)
	})
}

func checkPasswordReset(r *recipe) {
	reset := recipeRequest{method: "POST", path: "/password/reset"}
	r.does("One client can ask three times at once", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(3, always(reset)), 200, 3)
		s.wantDenied(reset, 429, "1200")
	})
	r.does("Then it can ask once every 20 minutes", func(s *servedRecipe) {
		s.statuses(3, always(reset))
		for minute := 1; minute <= 120; minute++ {
			s.later(time.Minute)
			want := 429
			if minute%20 == 0 {
				want = 200
			}
			if got := s.send(reset).status; got != want {
				s.Errorf("minute %d: status %d, want %d", minute, got, want)
			}
		}
	})
	r.does("However many addresses take part, no more than 100 requests", func(s *servedRecipe) {
		got := s.statuses(150, func(n int) recipeRequest {
			return recipeRequest{client: manyClients(n), method: "POST", path: "/password/reset"}
		})
		s.wantStatuses(got, 200, 100, 503, 50)
		s.later(59 * time.Minute)
		s.wantStatus(recipeRequest{client: anotherClient, method: "POST", path: "/password/reset"}, 503)
		s.wantSeen(s.app, 100)
	})
	r.does("Looking at the form (a GET) is not counted", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(20, always(recipeRequest{method: "GET", path: "/password/reset"})), 200, 20)
		s.wantStatuses(s.statuses(3, always(reset)), 200, 3)
	})
}

func checkPublicAPI(r *recipe) {
	withKey := func(client, key string) recipeRequest {
		return recipeRequest{client: client, method: "GET", path: "/api/things", header: map[string]string{"X-Api-Key": key}}
	}
	r.does("Each key has 60 requests at once", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(40, always(withKey(oneClient, "a"))), 200, 40)
		s.wantStatuses(s.statuses(30, always(withKey(anotherClient, "a"))), 200, 20, 429, 10)
		s.wantStatus(withKey(anotherClient, "b"), 200)
		s.wantDenied(withKey(oneClient, "a"), 429, "1")
		s.later(time.Second)
		s.wantStatuses(s.statuses(2, always(withKey(oneClient, "a"))), 200, 1, 429, 1)
	})
	r.does("A caller who sends another key each time gets 300 requests through", func(s *servedRecipe) {
		got := s.statuses(350, func(n int) recipeRequest { return withKey(oneClient, strconv.Itoa(n)) })
		s.wantStatuses(got, 200, 300, 429, 50)
	})
	r.does("Without a key only the second limit counts", func(s *servedRecipe) {
		got := s.statuses(350, always(recipeRequest{method: "GET", path: "/api/things"}))
		s.wantStatuses(got, 200, 300, 429, 50)
	})
	r.does("Answers tell of the limit that is closer to denying: `RateLimit: \"per_api_key\";r=59;t=1`", func(s *servedRecipe) {
		if got := s.send(withKey(oneClient, "a")).header.Get("RateLimit"); got != `"per_api_key";r=59;t=1` {
			s.Errorf("RateLimit: %s", got)
		}
	})
	r.does("Without `api_per_client` the configuration is refused", func(s *servedRecipe) {
		without := strings.Replace(r.caddyfile, "limit api_per_client 300/m", "", 1)
		_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(without), nil)
		if err == nil || !strings.Contains(err.Error(), "is written by the caller") || without == r.caddyfile {
			s.Errorf("the error is %v", err)
		}
	})
}

func checkVerifiedAPI(r *recipe) {
	withKey := func(client, key string) recipeRequest {
		return recipeRequest{client: client, method: "GET", path: "/", header: map[string]string{"X-Key": key, "X-Account": "forged-by-" + client}}
	}
	// a key is the name of its account; "wrong" is nobody's
	r.auth = func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Key") == "wrong" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Header().Set("X-Account", r.Header.Get("X-Key"))
	}
	r.does("An account has 100 requests, from however many clients", func(s *servedRecipe) {
		got := s.statuses(101, func(n int) recipeRequest { return withKey(manyClients(n), "alice") })
		s.wantStatuses(got, 200, 100, 429, 1)
		s.wantStatus(withKey(oneClient, "bob"), 200)
	})
	r.does("An `X-Account` that the caller writes changes nothing", func(s *servedRecipe) {
		got := s.statuses(101, func(n int) recipeRequest {
			request := withKey(oneClient, "alice")
			request.header["X-Account"] = strconv.Itoa(n)
			return request
		})
		s.wantStatuses(got, 200, 100, 429, 1)
		if got := s.app.last()["X-Account"]; len(got) != 1 || got[0] != "alice" {
			s.Errorf("the app was told the account %q", got)
		}
	})
	r.does("What the service refuses does not reach the app", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(200, func(int) recipeRequest {
			request := withKey(oneClient, "wrong")
			request.header["X-Account"] = "alice"
			return request
		}), 401, 200)
		s.wantSeen(s.app, 0)
		s.wantStatuses(s.statuses(101, always(withKey(anotherClient, "alice"))), 200, 100, 429, 1)
	})
	r.does("One client gets 600 requests to the service", func(s *servedRecipe) {
		got := s.statuses(610, func(int) recipeRequest { return withKey(oneClient, "wrong") })
		s.wantStatuses(got, 401, 600, 429, 10)
		s.wantSeen(s.auth, 600)
	})
}

func checkErrorSink(r *recipe) {
	report := func(client string) recipeRequest {
		return recipeRequest{client: client, method: "POST", path: "/errors", body: strings.NewReader("it broke")}
	}
	r.does("One client can send 30 reports at once", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(31, func(int) recipeRequest { return report(oneClient) }), 200, 30, 429, 1)
		s.later(2 * time.Second)
		s.wantStatuses(s.statuses(2, func(int) recipeRequest { return report(oneClient) }), 200, 1, 429, 1)
	})
	r.does("However many addresses take part, no more than 1000 reports", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(1100, func(n int) recipeRequest { return report(manyClients(n)) }), 200, 1000, 503, 100)
		s.later(59 * time.Minute)
		s.wantStatus(report(oneClient), 503)
		s.wantSeen(s.app, 1000)
	})
	r.does("What a client sends beyond its own limit takes nothing from the ceiling", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(1100, func(int) recipeRequest { return report(oneClient) }), 200, 30, 429, 1070)
		s.wantStatuses(s.statuses(971, func(n int) recipeRequest { return report(manyClients(n)) }), 200, 970, 503, 1)
	})
	r.does("A report larger than 16 kB gets 413", func(s *servedRecipe) {
		large := bytes.Repeat([]byte("x"), 16_001)
		s.wantStatus(recipeRequest{method: "POST", path: "/errors", body: bytes.NewReader(large)}, 413)
		s.wantStatus(recipeRequest{method: "POST", path: "/errors", body: unsized(large)}, 413)
		s.wantStatus(recipeRequest{method: "POST", path: "/errors", body: bytes.NewReader(large[1:])}, 200)
		if s.app.seenWhole() != 1 {
			s.Errorf("the app got %d whole reports, want 1", s.app.seenWhole())
		}
	})
}

// unsized is a body whose length is not announced.
func unsized(body []byte) io.Reader { return io.MultiReader(bytes.NewReader(body)) }

const megabyte = 1_000_000

// upload waits with its body until the server wants it, so that it sees a denial
// and no broken connection.
func upload(client string, size int) recipeRequest {
	return recipeRequest{
		client: client, method: "PUT", path: "/upload/file", body: bytes.NewReader(make([]byte, size)),
		header: map[string]string{"Expect": "100-continue"},
	}
}

func checkUploads(r *recipe) {
	r.does("Five uploads of 10 MB reach the app", func(s *servedRecipe) {
		for range 5 {
			s.wantStatus(upload(oneClient, 10*megabyte), 200)
		}
		s.wantDenied(upload(oneClient, 10*megabyte), 429, "720")
		s.wantSeen(s.app, 5)
		s.wantStatus(upload(anotherClient, 10*megabyte), 200)
		s.later(720 * time.Second)
		s.wantStatus(upload(oneClient, 10*megabyte), 200)
	})
	r.does("What is too large for the rest of the budget must wait", func(s *servedRecipe) {
		for _, size := range []int{10, 10, 10, 10, 5} {
			s.wantStatus(upload(oneClient, size*megabyte), 200)
		}
		s.wantStatus(upload(oneClient, 6*megabyte), 429)
		s.wantStatus(upload(oneClient, 4*megabyte), 200)
	})
	r.does("An upload larger than 10 MB gets 413", func(s *servedRecipe) {
		tooLarge := upload(oneClient, 10*megabyte+1)
		tooLarge.header = nil // Caddy's own 413 comes only when the body does
		s.wantStatus(tooLarge, 413)
		s.wantSeen(s.app, 0)
		for range 5 {
			s.wantStatus(upload(oneClient, 10*megabyte), 200)
		}
	})
	r.does("An upload that does not say how large it is gets 411", func(s *servedRecipe) {
		got := s.statuses(60, func(int) recipeRequest {
			return recipeRequest{method: "PUT", path: "/upload/file", body: unsized([]byte("text"))}
		})
		s.wantStatuses(got, 411, 60)
		s.wantStatus(upload(oneClient, 1), 429)
		s.wantSeen(s.app, 0)
	})
	r.does("60 uploads of one client pass, however small", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(61, func(int) recipeRequest { return upload(oneClient, 1) }), 200, 60, 429, 1)
	})
	r.does("A client can have two uploads running", func(s *servedRecipe) {
		release := s.holdAnswers()
		wait := s.atTheSameTime(2, recipeRequest{method: "PUT", path: "/upload/file"})
		s.waitUntil("two uploads at the app", func() bool { return s.app.seen() == 2 })
		s.wantDenied(upload(oneClient, 1), 429, "")
		other := s.atTheSameTime(1, recipeRequest{client: anotherClient, method: "PUT", path: "/upload/file"})
		s.waitUntil("another client's upload", func() bool { return s.app.seen() == 3 })
		release()
		s.wantStatuses(wait(), 200, 2)
		s.wantStatuses(other(), 200, 1)
		s.wantStatus(upload(oneClient, 1), 200)
	})
}

func checkUnmeasuredUploads(r *recipe) {
	unmeasured := func(size int) recipeRequest {
		return recipeRequest{method: "PUT", path: "/upload/file", body: unsized(make([]byte, size))}
	}
	r.does("Five uploads without a `Content-Length` pass", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(6, func(int) recipeRequest { return unmeasured(1000) }), 200, 5, 429, 1)
		s.wantStatuses(s.statuses(5, func(int) recipeRequest { return upload(oneClient, 10*megabyte) }), 200, 5)
		s.wantStatus(upload(oneClient, 10*megabyte), 429)
	})
	r.does("What turns out to be larger than 10 MB does not reach the app as a whole", func(s *servedRecipe) {
		s.wantStatus(unmeasured(10*megabyte+1), 413)
		if s.app.seenWhole() != 0 {
			s.Error("the app got the whole upload")
		}
	})
}

func checkScraping(r *recipe) {
	page := func(client string) recipeRequest {
		return recipeRequest{client: client, method: "GET", path: "/products/1"}
	}
	r.does("One address gets 60 pages at once", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(61, always(page(oneClient))), 200, 60, 429, 1)
		s.later(time.Second)
		s.wantStatuses(s.statuses(2, always(page(oneClient))), 200, 1, 429, 1)
		s.wantStatus(page(anotherClient), 200)
	})
	r.does("The addresses of one `/24` get 300 together", func(s *servedRecipe) {
		got := s.statuses(400, func(n int) recipeRequest { return page(fmt.Sprintf("198.51.100.%d", n%200)) })
		s.wantStatuses(got, 200, 300, 429, 100)
		s.wantStatus(page("198.51.101.1"), 200)
	})
	r.does("All addresses of an IPv6 `/64` count as one client", func(s *servedRecipe) {
		got := s.statuses(100, func(n int) recipeRequest { return page(fmt.Sprintf("2001:db8:1:1::%x", n+1)) })
		s.wantStatuses(got, 200, 60, 429, 40)
		got = s.statuses(400, func(n int) recipeRequest { return page(fmt.Sprintf("2001:db8:1:%x::1", n+2)) })
		s.wantStatuses(got, 200, 240, 429, 160)
		s.wantStatus(page("2001:db8:0:1::1"), 200)
	})
	r.does("Other paths, such as images and style sheets, are not limited", func(s *servedRecipe) {
		got := s.statuses(400, always(recipeRequest{method: "GET", path: "/style.css"}))
		s.wantStatuses(got, 200, 400)
	})
}

func checkWebSockets(r *recipe) {
	r.app = func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			return
		}
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(conn, buffered)
	}
	r.does("A client can have five connections open", func(s *servedRecipe) {
		for range 5 {
			s.openWebSocket(oneClient)
		}
		s.wantDenied(recipeRequest{method: "GET", path: "/ws/chat"}, 429, "")
		s.openWebSocket(anotherClient)
	})
	r.does("When one is closed, another can be opened", func(s *servedRecipe) {
		for range 4 {
			s.openWebSocket(oneClient)
		}
		last := s.openWebSocket(oneClient)
		s.wantStatus(recipeRequest{method: "GET", path: "/ws/chat"}, 429)
		last.Close()
		s.waitUntil("the place of the closed connection", func() bool {
			_, status := s.tryWebSocket(oneClient)
			return status == http.StatusSwitchingProtocols
		})
	})
	r.does("At most 200 are open together", func(s *servedRecipe) {
		for n := range 200 {
			s.openWebSocket(manyClients(n))
		}
		s.wantDenied(recipeRequest{client: anotherClient, method: "GET", path: "/ws/chat"}, 503, "")
	})
	r.does("A client can connect 30 times at once", func(s *servedRecipe) {
		open := s.openWebSocket(oneClient)
		s.wantStatuses(s.statuses(30, always(recipeRequest{method: "GET", path: "/ws/chat"})), 200, 29, 429, 1)
		for range 1000 {
			open.echo(s)
		}
		s.later(2 * time.Second)
		s.wantStatuses(s.statuses(2, always(recipeRequest{method: "GET", path: "/ws/chat"})), 200, 1, 429, 1)
	})
}

// recipeSocket is an upgraded connection to the app, which echoes.
type recipeSocket struct {
	net.Conn
	reader *bufio.Reader
}

func (c *recipeSocket) echo(s *servedRecipe) {
	s.Helper()
	const message = "hello\n"
	if _, err := io.WriteString(c, message); err != nil {
		s.Fatal(err)
	}
	if answer, err := c.reader.ReadString('\n'); err != nil || answer != message {
		s.Fatalf("the echo is %q: %v", answer, err)
	}
}

func (s *servedRecipe) openWebSocket(client string) *recipeSocket {
	s.Helper()
	socket, status := s.tryWebSocket(client)
	if status != http.StatusSwitchingProtocols {
		s.Fatalf("opening a connection of %s: status %d", client, status)
	}
	socket.echo(s)
	return socket
}

// tryWebSocket asks the app for an upgrade, through Caddy.
func (s *servedRecipe) tryWebSocket(client string) (*recipeSocket, int) {
	s.Helper()
	conn, err := net.Dial("tcp", s.address)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(conn, "GET /ws/chat HTTP/1.1\r\nHost: test.local\r\nX-Forwarded-For: %s\r\n"+
		"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", client)
	socket := &recipeSocket{conn, bufio.NewReader(conn)}
	response, err := http.ReadResponse(socket.reader, nil)
	if err != nil {
		s.Fatal(err)
	}
	return socket, response.StatusCode
}

func checkCloudflare(r *recipe) {
	const someRange = "173.245.48.0/20"
	// what the visitor writes, and what Cloudflare makes of it
	through := func(visitor string) recipeRequest {
		return recipeRequest{client: "6.6.6.6, " + visitor, method: "GET", path: "/", header: map[string]string{
			"CF-Connecting-IP": visitor, "X-Real-IP": "6.6.6.6", "Forwarded": "for=6.6.6.6", "True-Client-IP": "6.6.6.6",
		}}
	}
	r.fromRange = someRange
	r.does("Through Cloudflare the visitor is the address in `CF-Connecting-IP`", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(301, func(n int) recipeRequest {
			request := through(oneClient)
			request.client = manyClients(n) + ", " + manyClients(n+1)
			return request
		}), 200, 300, 429, 1)
	})
	r.does("The app gets that address in `X-Forwarded-For` and in `CF-Connecting-IP`", func(s *servedRecipe) {
		s.wantStatus(through(oneClient), 200)
		s.wantTold(oneClient, "CF-Connecting-IP")
	})
	r.does("Each visitor has a budget of his own", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(400, func(n int) recipeRequest { return through(manyClients(n)) }), 200, 400)
	})
	r.fromRange = ""
	r.does("Who goes around Cloudflare is limited by his own address", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(301, func(n int) recipeRequest { return through(manyClients(n)) }), 200, 300, 429, 1)
		s.wantTold("127.0.0.1", "CF-Connecting-IP")
	})
}

// wantTold checks that the app was told the client in X-Forwarded-For and in the
// headers that are named, once in each, and by no other.
func (s *servedRecipe) wantTold(client string, headers ...string) {
	s.Helper()
	got := s.app.last()
	for _, name := range append(headers, headerForwardedFor) {
		if values := got.Values(name); len(values) != 1 || values[0] != client {
			s.Errorf("the app was told %s %q, want %s", name, values, client)
		}
		got.Del(name)
	}
	for _, name := range []string{"X-Real-IP", "Forwarded", "True-Client-IP", "CF-Connecting-IP", "X-Client-IP"} {
		if values := got.Values(name); len(values) > 0 {
			s.Errorf("the app was told %s %q, want none", name, values)
		}
	}
}

func checkAllowlists(r *recipe) {
	from := func(client string) func(int) recipeRequest {
		return always(recipeRequest{client: client, method: "GET", path: "/"})
	}
	r.does("Clients in these ranges are not limited by `per_client`", func(s *servedRecipe) {
		for _, exempt := range []string{"198.51.100.9", "2001:db8:1:2::9", "192.0.2.10"} {
			s.wantStatuses(s.statuses(150, from(exempt)), 200, 150)
		}
		s.wantStatuses(s.statuses(121, from("192.0.2.11")), 200, 120, 429, 1)
	})
	r.does("The ceiling holds for them too", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(610, from("198.51.100.9")), 200, 600, 503, 10)
	})
	r.does("Nobody is exempt because of what he writes", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(121, from("198.51.100.9, "+oneClient)), 200, 120, 429, 1)
	})
	r.does("A client that could not be resolved is not exempt", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(121, from("unknown")), 200, 120, 429, 1)
	})
}

func checkTrialRun(r *recipe) {
	r.app = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/login" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}
	page := recipeRequest{method: "GET", path: "/"}
	r.does("Nobody is denied: not by a limit, not by a ban, not by `unresolved deny`", func(s *servedRecipe) {
		s.wantStatuses(s.statuses(100, always(page)), 200, 100)
		s.wantStatuses(s.statuses(20, always(recipeRequest{method: "POST", path: "/login"})), 401, 20)
		s.wantStatuses(s.statuses(100, always(recipeRequest{client: "unknown", method: "GET", path: "/"})), 200, 100)
	})
	r.does("`caddy_edge_limit_requests_total{name=\"per_client\",outcome=\"would_deny\"}` counts", func(s *servedRecipe) {
		s.statuses(100, always(page))
		if got := s.requestsTotal("per_client", "would_deny"); got != 40 {
			s.Errorf("%v would have been denied, want 40", got)
		}
		if got := s.requestsTotal("per_client", "allowed"); got != 60 {
			s.Errorf("%v were allowed, want 60", got)
		}
	})
	r.does("What would have been denied uses nothing up", func(s *servedRecipe) {
		s.statuses(100, always(page))
		s.later(time.Second) // one more
		s.statuses(2, always(page))
		if got := s.requestsTotal("per_client", "allowed"); got != 61 {
			s.Errorf("%v were allowed, want 61", got)
		}
	})
	r.does("The app gets one address in `X-Forwarded-For`", func(s *servedRecipe) {
		forged := recipeRequest{client: "6.6.6.6, " + oneClient, method: "GET", path: "/", header: map[string]string{"X-Real-IP": "6.6.6.6"}}
		s.wantStatuses(s.statuses(61, always(forged)), 200, 61)
		s.wantTold(oneClient)
	})
}

// requestsTotal reads the metric of that name.
func (s *servedRecipe) requestsTotal(name, outcome string) float64 {
	s.Helper()
	ctx := caddy.ActiveContext()
	families, err := ctx.GetMetricsRegistry().Gather()
	if err != nil {
		s.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != "caddy_edge_limit_requests_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := make(map[string]string)
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			if labels["name"] == name && labels["outcome"] == outcome {
				return metric.GetCounter().GetValue()
			}
		}
	}
	s.Fatalf("there is no metric of %s, %s", name, outcome)
	return 0
}
