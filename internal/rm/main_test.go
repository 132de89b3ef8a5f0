package rm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/inject"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/rpc"
)

// childEnv makes the test binary a resource manager of its own, to be killed.
const childEnv = "MARU_TEST_RM_CONFIG"

func TestMain(m *testing.M) {
	if raw := os.Getenv(childEnv); raw != "" {
		var cfg Config
		if err := json.Unmarshal([]byte(raw), &cfg); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		s, err := Start(context.Background(), cfg)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("serving")
		<-s.Failed() // until it is killed
		os.Exit(1)
	}
	if raw := os.Getenv(mapperEnv); raw != "" {
		mapper([]byte(raw))
	}
	inject.Main(map[string]inject.Subject{"rm": rmSubject})
	leak.Check(m)
}

// mapperEnv makes the test binary a process that holds regions until it is killed.
const mapperEnv = "MARU_TEST_RM_MAPPER"

type mapperJob struct {
	Socket  string
	Request []byte // HoldRequest
}

func mapper(raw []byte) {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var j mapperJob
	if err := json.Unmarshal(raw, &j); err != nil {
		fail(err)
	}
	req := &maruv1.HoldRequest{}
	if err := proto.Unmarshal(j.Request, req); err != nil {
		fail(err)
	}
	conn, err := rpc.NewClient("unix:"+j.Socket, rpc.Retry{})
	if err != nil {
		fail(err)
	}
	answer, err := maruv1.NewResourceManagerClient(conn).Hold(context.Background(), req)
	if err != nil {
		fail(err)
	}
	if !answer.GetProvable() {
		fail(fmt.Errorf("not provable: %s", answer.GetReason()))
	}
	fmt.Println("serving")
	select {}
}
